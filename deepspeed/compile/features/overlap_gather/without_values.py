# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Functions of torch that read no values of a tensor: they describe it, or make another one like it.

These functions do not wait for a parameter that is being gathered. All other functions count as reads or writes.
"""

from typing import Any, Callable, FrozenSet, Iterator

import torch
from torch import Tensor

# Functions of torch, and methods of tensors by the same name.
_FUNCTIONS = (
    *("numel", "get_device", "is_floating_point", "is_signed", "is_same_size", "is_inference"),
    *("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "randint_like"),
    "_has_compatible_shallow_copy_type",
)
_METHODS = (
    # Not "dim", nor "ndimension", for which torch says "dim": vmap() calls it before it reads values past the class.
    *("size", "nelement", "stride", "storage_offset", "element_size", "is_contiguous", "__len__"),
    *("dim_order", "is_pinned", "is_shared"),
    *("new_zeros", "new_ones", "new_empty", "new_empty_strided"),
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_"),
)
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "name", "names"),
    *("is_cuda", "is_cpu", "is_xpu", "is_meta", "is_mps", "is_xla", "is_ipu", "is_maia", "is_mtia", "is_vulkan"),
    *("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn"),
    *("grad_fn", "_grad_fn", "grad_dtype", "is_leaf", "output_nr", "retains_grad", "volatile", "_version"),
)
# Attributes that may also be set and deleted.
_STATES = ("grad", "_grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


def _list() -> Iterator[Callable[..., Any]]:
    places = [(place, name) for place in (torch, Tensor) for name in (*_FUNCTIONS, *_METHODS)]
    for place, name in places:
        if hasattr(place, name) and (place is Tensor or name in _FUNCTIONS):
            yield getattr(place, name)
    for name in (*_ATTRIBUTES, *_STATES):
        # Releases of torch differ in a few attributes.
        attribute = getattr(Tensor, name, None)
        if attribute is not None:
            yield attribute.__get__
        if attribute is not None and name in _STATES:
            yield attribute.__set__
            yield attribute.__delete__


# The functions as ``__torch_function__`` gets them.
WITHOUT_VALUES: FrozenSet[Callable[..., Any]] = frozenset(_list())
