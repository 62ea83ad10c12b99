# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Copies parts of gradients to their places in one tensor, and scales them."""

from typing import List, Optional, Tuple

import torch


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
    # Split once for all places: one slice for each would take longer than to copy small parts.
    places = [*memory.split_with_sizes(sizes)]
    for index in reversed(gaps):
        places.pop(index).zero_()
    return [(part, place) for (_, part), place in zip(parts, places, strict=True)]
