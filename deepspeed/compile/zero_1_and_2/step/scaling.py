# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Copies the gradients of a partition into one tensor in the dtype of the master weights, and scales them."""

from typing import List, Optional, Tuple

import torch

from ..gradient.views import PartitionViews


def take_scaled(views: PartitionViews, factor: Optional[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Takes the gradients of a partition out of its views. Those that are copied die when this function returns.

    Args:
        factor: an fp32 tensor [1] with which to multiply gradients, or None for 1.
        like: the master weights of the partition, 1-D.

    Returns:
        the gradient of the master weights, 1-D, in their dtype. Padding is zero. If all gradients lie in one tensor,
        which is in this dtype then, that tensor is scaled in place and returned.
    """
    flat = views.flat_partition
    gradients = views.take()
    if flat is not None:
        return flat if factor is None else flat.mul_(factor)
    # Profiles of memory tell by this name that it is memory of gradients.
    with torch.profiler.record_function("deepcompile::gradient_range"):
        memory = like.new_empty(like.numel())
    scale_into(memory, gradients, 0, factor)
    return memory


def scale_into(
    memory: torch.Tensor, parts: List[Tuple[int, torch.Tensor]], first: int, factor: Optional[torch.Tensor]
) -> None:
    """Copies parts of gradients, each with its offset, into ``memory``, which begins at the offset ``first``.

    Multiplies them by ``factor``, unless it is None, and zeroes the padding.
    """
    laid_out = _laid_out(memory, parts, first)
    if factor is None or memory.is_cpu:
        # On a CPU, a product of two dtypes takes several times as long as a cast and a product of one dtype.
        if laid_out:
            torch._foreach_copy_([place for _, place in laid_out], [part for part, _ in laid_out])
        if factor is not None:
            memory.mul_(factor)
        return
    for part, place in laid_out:
        # The factor has one dimension, so torch computes the product in the factor's dtype. With a factor without
        # dimensions, torch would compute in the dtype of `part`.
        torch.mul(part, factor, out=place)


def _laid_out(memory, parts, first):
    """Lists each part and its place in ``memory``, which begins at the offset ``first``, and zeroes the padding."""
    sizes, gaps, filled = [], [], first
    for begin, part in parts:
        if begin > filled:
            gaps.append(len(sizes))
            sizes.append(begin - filled)
        numel = part.numel()
        sizes.append(numel)
        filled = begin + numel
    end = first + memory.numel()
    if filled < end:
        gaps.append(len(sizes))
        sizes.append(end - filled)
    # One call for all places: to cut them out one by one would take longer than to copy small parts.
    places = [*memory.split_with_sizes(sizes)]
    for index in reversed(gaps):
        places.pop(index).zero_()
    return [(part, place) for (_, part), place in zip(parts, places, strict=True)]
