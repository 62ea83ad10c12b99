# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Parameters that are tensor subclasses without memory of their own, such as torchao's quantized weights."""

import sys
from typing import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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
