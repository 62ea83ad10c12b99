# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gives the gradient of a partition to an optimizer range by range, and drops what has been given."""

import copy
from typing import TYPE_CHECKING, Iterable, Iterator, List, Optional, Tuple

import torch

from .compiled_update import ALIGN_NUMEL

if TYPE_CHECKING:
    from .layout import PartitionViews

# A gradient of at least so many elements is read where it lies. Of smaller ones, so many are copied together: to start
# a kernel for each would take longer than the copy.
LARGE_NUMEL = 2**22
GATHERED_NUMEL = 2**25


class MasterGradient:
    """The scaled gradient of a partition in the dtype of its master weights, made range by range.

    Args:
        views: the PartitionViews of the partition. This object takes the gradients out of them.
        factor: an fp32 tensor [1] with which to multiply gradients, or None for 1.
        like: a tensor of the dtype and on the device of the master weights.
        dtype: the dtype of the gradients.
    """

    def __init__(
        self, views: "PartitionViews", factor: Optional[torch.Tensor], like: torch.Tensor, dtype: torch.dtype
    ):
        # (offset, gradient), with the lowest offset last, so that pop() takes it.
        self._rest: List[Tuple[int, torch.Tensor]] = sorted(views.take(), key=lambda entry: entry[0], reverse=True)
        self.factor = factor
        self._memory = like.new_empty(0)
        self._gathered = like.new_empty(0, dtype=dtype)

    def split_off(self, spans: List[Tuple[int, int]]) -> "MasterGradient":
        """Moves the gradients in ``spans``, each [first, last), to a new object. None may lie there in part."""
        new = copy.copy(self)
        new._rest = [entry for entry in self._rest if any(first <= entry[0] < last for first, last in spans)]
        self._rest = [entry for entry in self._rest if all(not first <= entry[0] < last for first, last in spans)]
        return new

    def take(self, first: int, last: int) -> torch.Tensor:
        """Returns elements [first, last) of the partition's scaled gradient, 1-D. Padding is zero.

        The next call overwrites what this call returns. Calls of this method and of :meth:`take_unscaled` must ask for
        ranges in ascending order. A gradient is dropped as soon as all its elements have been taken.
        """
        if self._memory.numel() < last - first:
            with torch.profiler.record_function("deepcompile::master_gradient"):
                self._memory = self._memory.new_empty(last - first)
        gradient = self._memory[: last - first]
        for part, place in _laid_out(self._parts(first, last), gradient, first):
            self._scale(part, place)
        return gradient

    def end_of_range(self, first: int, limit: int) -> int:
        """Returns where to end a range from ``first`` on, so that :meth:`take_unscaled` copies little.

        The range ends where a large gradient begins or ends, and at ``limit`` at the latest. If ``first`` is a
        multiple of ``ALIGN_NUMEL``, so is the end, except at the end of the partition.
        """
        gathered = min(first + GATHERED_NUMEL, limit)
        for offset, gradient in reversed(self._rest):
            if offset >= gathered:
                break
            end = min(offset + gradient.numel(), limit)
            end -= end % ALIGN_NUMEL
            if gradient.numel() >= LARGE_NUMEL and offset % ALIGN_NUMEL == 0 and _is_aligned(gradient) and end > first:
                return offset if offset > first else end
        aligned = gathered - gathered % ALIGN_NUMEL
        return aligned if aligned > first else gathered

    def take_unscaled(self, first: int, last: int) -> torch.Tensor:
        """Returns elements [first, last) of the partition's gradient, 1-D, not scaled, and in their own dtype.

        They begin at a multiple of 16 bytes. They may lie in the memory of a gradient, or of the next call.
        """
        parts = list(self._parts(first, last))
        if len(parts) == 1 and parts[0][1].numel() == last - first and _is_aligned(parts[0][1]):
            return parts[0][1]
        if self._gathered.numel() < last - first:
            with torch.profiler.record_function("deepcompile::master_gradient"):
                self._gathered = self._gathered.new_empty(last - first)
        gradient = self._gathered[: last - first]
        laid_out = [*_laid_out(parts, gradient, first)]
        if laid_out:
            torch._foreach_copy_([place for _, place in laid_out], [part for part, _ in laid_out])
        return gradient

    def _parts(self, first, last):
        """Yields (offset in the partition, elements) of the gradients in [first, last), and drops what is behind."""
        while self._rest and self._rest[-1][0] < last:
            offset, gradient = self._rest[-1]
            begin, end = max(offset, first), min(offset + gradient.numel(), last)
            if end == offset + gradient.numel():
                self._rest.pop()
            yield begin, gradient[begin - offset : end - offset]
            if end == last:
                break

    def _scale(self, source, target):
        if self.factor is None:
            target.copy_(source)
        elif target.is_cpu:
            # On a CPU, a product of two dtypes takes several times as long as a cast and a product of one dtype.
            target.copy_(source).mul_(self.factor)
        else:
            # The factor has one dimension, so torch computes the product in the factor's dtype. With a factor without
            # dimensions, torch would compute in the dtype of `source`.
            torch.mul(source, self.factor, out=target)


def _laid_out(
    parts: Iterable[Tuple[int, torch.Tensor]], memory: torch.Tensor, first: int
) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """Yields each part and its place in ``memory``, which begins at the offset ``first``.

    When the caller has taken all parts, the padding between and behind them is zero.
    """
    filled = first
    for begin, part in parts:
        # To zero nothing costs the host as much as to zero something, and most gradients lie side by side.
        if begin > filled:
            memory[filled - first : begin - first].zero_()
        filled = begin + part.numel()
        yield part, memory[begin - first : filled - first]
    if filled - first < memory.numel():
        memory[filled - first :].zero_()


def _is_aligned(tensor):
    return tensor.data_ptr() % 16 == 0
