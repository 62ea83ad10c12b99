# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Functions that DeepSpeed's engine calls to handle parameters that are tensor subclasses."""

from typing import Iterator, Tuple

import torch
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .tensors import is_dtensor, plain_tensors

# Marks parameters that another part broadcasts, which DeepSpeed must leave out.
BROADCAST_LATER = "_is_broadcast_later"
# Attributes by which DeepSpeed chooses the process group of a parameter, or leaves the parameter out.
_MARKS = ("allreduce", "group_name", "ds_status", "ds_optim_param")


def to_broadcast(module: Module) -> Iterator[Tuple[str, torch.Tensor]]:
    """Called when an engine begins. Yields (name of a parameter, tensor), which DeepSpeed broadcasts as bytes.

    The tensor may be a copy, which is written back when the caller asks for the next tensor.
    """
    for name, parameter in module.named_parameters():
        if BROADCAST_LATER in vars(parameter):
            continue
        # Each rank has its own part of a DTensor.
        for tensor in [parameter] if is_dtensor(parameter) else plain_tensors([parameter]):
            sent = once = tensor
            # Only a contiguous tensor with a dimension can be viewed as bytes.
            if not tensor.dim() or not tensor.is_contiguous():
                # An expanded tensor shows the same memory several times.
                once = tensor.detach()[tuple(slice(None, None if stride else 1) for stride in tensor.stride())]
                sent = once.new_empty(once.numel()).copy_(once.reshape(-1))
            if sent is not parameter:
                vars(sent).update({mark: getattr(parameter, mark) for mark in _MARKS if hasattr(parameter, mark)})
            yield name, sent
            if once is not tensor:
                once.copy_(sent.view(once.shape))


def named_parameters(module: Module) -> Iterator[Tuple[str, Parameter]]:
    """Called when an engine begins. Yields the parameters of which DeepSpeed may keep weak references.

    DeepSpeed uses the references to name parameters in messages. Torch cannot move a parameter that wraps other
    tensors while a weak reference to it exists.
    """
    return (entry for entry in module.named_parameters() if not is_traceable_wrapper_subclass(entry[1]))
