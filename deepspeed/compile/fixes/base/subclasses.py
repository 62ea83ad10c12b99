# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes DeepSpeed handle parameters that are tensor subclasses, such as torchao's quantized weights.

To DeepSpeed: the engine broadcasts ``parameter.data`` at its beginning, keeps weak references to parameters for its
debug names, and loads checkpoints through ``map_location`` functions. None of these works for a tensor that wraps
other tensors. Please broadcast the inner tensors, and name parameters without references.
"""

import sys
from typing import Iterable, Iterator, Tuple

import torch
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Marks parameters that another part broadcasts, which DeepSpeed must leave out.
BROADCAST_LATER = "_is_broadcast_later"
# Attributes by which DeepSpeed chooses the process group of a parameter, or leaves the parameter out.
_MARKS = ("allreduce", "group_name", "ds_status", "ds_optim_param")


def plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the tensors that have memory: each tensor itself, or the tensors that it wraps."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from plain_tensors(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ``DTensor``. Does not import its module, which takes a quarter of DeepSpeed's import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


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
