# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a partition, which is returned range by range and dropped."""

import bisect
import itertools
from typing import TYPE_CHECKING, List, Optional, Tuple

import torch

if TYPE_CHECKING:
    from ..gradient.views import PartitionViews

# A range that is read in place has a multiple of so many elements, so that a kernel reads 16 bytes at a time in every
# dtype.
ALIGN_NUMEL = 16
# A gradient of at least IN_PLACE_NUMEL elements is read in place. Smaller gradients are copied together, up to
# GATHERED_NUMEL elements: to start a kernel for each would take longer than the copy.
IN_PLACE_NUMEL = 2**22
GATHERED_NUMEL = 2**25


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory begins at a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 == 0


class PartitionGradient:
    """The gradient of a partition. Each range can be taken once, in any order.

    A parameter's gradient is dropped as soon as all its elements have been taken. Within one gradient, ranges
    must ascend.

    Args:
        views: the views of the partition. This object takes the gradients out of them.
        factor: an fp32 tensor [1] with which to multiply gradients, or None for 1.
        like: a tensor of the dtype and on the device of the master weights.
    """

    def __init__(
        self, views: "PartitionViews", factor: Optional[torch.Tensor], like: torch.Tensor, dtype: torch.dtype
    ):
        # The tensor of all gradients, if it has the dtype of the master weights. It is scaled and read in place.
        self._flat = views.flat_partition
        taken = views.take()
        # (offset, offset behind it, gradient), in ascending order.
        self._rest: List[Tuple[int, int, torch.Tensor]] = []
        if self._flat is None:
            self._rest = [(offset, offset + gradient.numel(), gradient) for offset, gradient in taken]
        self._factor = factor
        self._memory = like.new_empty(0)
        self._gathered = like.new_empty(0, dtype=dtype)

    def scaled(self, first: int, last: int) -> torch.Tensor:
        """Returns the elements [first, last), 1-D, scaled, in the dtype of the master weights. Padding is zero.

        The next call overwrites the result.
        """
        if self._flat is not None:
            gradient = self._flat[first:last]
            return gradient if self._factor is None else gradient.mul_(self._factor)
        self._memory = _at_least(last - first, self._memory)
        gradient = self._memory[: last - first]
        _scale_into(gradient, self._parts(first, last), first, self._factor)
        return gradient

    def unscaled(self, first: int, limit: int, multiple: int = ALIGN_NUMEL) -> torch.Tensor:
        """Returns elements from ``first`` on, 1-D, not scaled, and in their own dtype. Padding is zero.

        They begin at a multiple of 16 bytes and end at ``limit`` at the latest. Their number is a multiple of
        ``multiple``, which is a multiple of ``ALIGN_NUMEL``, and at least one. They may lie in the memory of a
        gradient, or, if a copy is needed, in memory that the next call overwrites. A call copies few elements.
        """
        if self._flat is not None:
            gradient = self._flat[first : limit - (limit - first) % multiple]
            if is_aligned(gradient):
                return gradient
            gradient = gradient[:GATHERED_NUMEL]
            return self._gather([(first, gradient)], first, first + gradient.numel())
        last = self._end(first, limit, multiple)
        parts = self._parts(first, last)
        if len(parts) == 1 and parts[0][1].numel() == last - first and is_aligned(parts[0][1]):
            return parts[0][1]
        return self._gather(parts, first, last)

    def by_offset(self) -> List[Tuple[int, torch.Tensor]]:
        """Lists (offset in the partition, 1-D gradient) of those that have not been taken, in ascending order."""
        return [(offset, gradient) for offset, _, gradient in self._rest] if self._flat is None else [(0, self._flat)]

    def as_they_are(self, first: int, last: int) -> List[torch.Tensor]:
        """Returns what keeps the memory of the gradients in [first, last), for a caller that knows where they lie."""
        return [] if self._flat is not None else [gradient for _, gradient in self._parts(first, last)]

    def _gather(self, parts, first, last):
        """Copies the parts of [first, last) together."""
        self._gathered = _at_least(last - first, self._gathered)
        gradient = self._gathered[: last - first]
        _scale_into(gradient, parts, first, None)
        return gradient

    def give_memory_back(self) -> None:
        """Drops the memory of the ranges that the last calls have returned."""
        self._memory, self._gathered = self._memory.new_empty(0), self._gathered.new_empty(0)

    def drop(self) -> None:
        """Drops everything. Called when all elements have been taken, by a caller who decides how long they live."""
        self._flat, self._rest = None, []
        self.give_memory_back()

    def _end(self, first, limit, multiple):
        """Returns the end of the range from ``first`` on: before a large gradient that is read in place, behind it, or
        after enough small gradients."""
        gathered = min(first + GATHERED_NUMEL, limit)
        for offset, behind, gradient in itertools.islice(self._rest, self._index(first), None):
            if offset >= gathered:
                break
            if behind - offset < IN_PLACE_NUMEL:
                continue
            # A range that is read in place has whole multiples, counted from `first`.
            begin = max(first, offset + (first - offset) % multiple)
            end = min(behind, limit)
            end -= (end - first) % multiple
            if begin < end and is_aligned(gradient[begin - offset :]):
                return begin if begin > first else end
        return gathered - (gathered - first) % multiple

    def _parts(self, first, last):
        """Lists (offset in the partition, elements) of the gradients in [first, last), and drops those that end
        there."""
        index, parts, behind = self._index(first), [], 0
        for offset, end, gradient in itertools.islice(self._rest, index, None):
            if offset >= last:
                break
            if first <= offset and end <= last:
                parts.append((offset, gradient))
            else:
                begin = max(offset, first)
                parts.append((begin, gradient[begin - offset : min(end, last) - offset]))
            behind += end <= last
        del self._rest[index : index + behind]
        return parts

    def _index(self, first):
        """Returns the index of the first gradient that ends behind the element ``first``."""
        return bisect.bisect_right(self._rest, first, key=lambda entry: entry[1])


def _at_least(numel, memory):
    """Returns ``memory``, or new memory if it has fewer than ``numel`` elements. Pictures show it with gradients."""
    if memory.numel() >= numel:
        return memory
    with torch.profiler.record_function("deepcompile::gradient_range"):
        return memory.new_empty(numel)


def _scale_into(
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
