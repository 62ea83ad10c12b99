# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Entries of state dicts whose values the first rank has alone (``compile.shard_parameters``)."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..overlap_gather.without_values import WITHOUT_VALUES


class OnFirstRank(torch.Tensor):
    """An entry of a state dict whose values another rank has. The entry is on the meta device.

    So each rank may prepare a state dict as the first rank does, which saves it.
    """

    @classmethod
    def __torch_function__(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **(kwargs or {}))
        except (RuntimeError, TypeError) as error:
            raise _refusal_to_read() from error
        if function in WITHOUT_VALUES:
            return _as_on_first_rank(result)
        # Torch computes much of a tensor with values and one without, and leaves the result unwritten.
        if any(isinstance(item, torch.Tensor) and not item.is_meta for item in tree_leaves((args[:1], result))):
            raise _refusal_to_read()
        return tree_map(_as_on_first_rank, result)

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.setdefault(id(self), on_first_rank(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "with compile.shard_parameters only rank 0 gets the values of a state dict, and another rank was to save "
            "it; save it on rank 0 alone"
        )


def _refusal_to_read():
    return RuntimeError(
        "with compile.shard_parameters only rank 0 gets the values of a state dict that is made to be saved, and "
        "another rank was to read it; read engine.module.state_dict() on all ranks"
    )


def _as_on_first_rank(item):
    is_other = isinstance(item, torch.Tensor) and item.is_meta and not isinstance(item, OnFirstRank)
    return item.as_subclass(OnFirstRank) if is_other else item


def on_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what stands in a state dict for a tensor at rest whose values the first rank has."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(OnFirstRank)
