# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Parameters that are made of other tensors and have no memory of their own, such as torchao's quantized weights."""

import sys
from typing import Iterable, Iterator, Tuple

import torch
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the tensors that have memory: each tensor itself, or else those of which it is made."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from plain_tensors(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a ``DTensor``. Does not import what defines these, which takes a quarter of DeepSpeed's import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


# What DeepSpeed's engine calls ------------------------------------------------------------------------------------


# Marks parameters that are on the host until they are sharded. Only then does each rank get the first rank's values.
ON_HOST = "_sharded_from_host"
# By what DeepSpeed chooses the process group of a parameter, or leaves it out.
_MARKS = ("allreduce", "group_name", "ds_status", "ds_optim_param")


def to_broadcast(module: Module) -> Iterator[Tuple[str, torch.Tensor]]:
    """Called when an engine begins. Yields (name of a parameter, tensor), which DeepSpeed broadcasts as bytes.

    What is yielded may be a copy. It is written back when the caller asks for the next one.
    """
    for name, parameter in module.named_parameters():
        if ON_HOST in vars(parameter):
            continue
        # Each rank has a part of its own of a DTensor.
        for tensor in [parameter] if is_dtensor(parameter) else plain_tensors([parameter]):
            sent = once = tensor
            # Only a contiguous tensor with a dimension can be viewed as bytes.
            if not tensor.dim() or not tensor.is_contiguous():
                # An expanded tensor has the same memory several times.
                once = tensor.detach()[tuple(slice(None, None if stride else 1) for stride in tensor.stride())]
                sent = once.new_empty(once.numel()).copy_(once.reshape(-1))
            if sent is not parameter:
                vars(sent).update({mark: getattr(parameter, mark) for mark in _MARKS if hasattr(parameter, mark)})
            yield name, sent
            if once is not tensor:
                once.copy_(sent.view(once.shape))


def named_parameters(module: Module) -> Iterator[Tuple[str, Parameter]]:
    """Called when an engine begins. Yields the parameters of which DeepSpeed may keep weak references.

    DeepSpeed keeps these to name parameters in messages. Torch cannot move a parameter that is made of other tensors
    while anybody has a weak reference to it.
    """
    return (each for each in module.named_parameters() if not is_traceable_wrapper_subclass(each[1]))
