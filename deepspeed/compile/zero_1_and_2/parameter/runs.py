# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""This rank's partition of a group's parameters: where its elements lie in memory."""

import bisect
from typing import Iterator, List, Tuple

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..layout import Layout, layouts_of

# Elements that are copied to another device or dtype at a time, through memory of their size.
PIECE_NUMEL = 2**24


class Runs:
    """The elements of a partition in order: runs of contiguous memory.

    Args:
        memory: 1-D, in which the runs lie.
        runs: (offset in the partition, offset in the memory) of each run, ascending. The first has the offset 0.
        numel: elements of the partition.
    """

    def __init__(self, memory: torch.Tensor, runs: List[Tuple[int, int]], numel: int):
        self.memory, self.numel, self._runs = memory, numel, runs

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def between(self, first: int, last: int) -> Iterator[Tuple[int, int, int]]:
        """Yields (offset in the partition, in the memory, elements) of the parts of runs in [first, last)."""
        number = bisect.bisect(self._runs, (first, self.memory.numel())) - 1
        while first < last:
            begin, place = self._runs[number]
            number += 1
            end = self._runs[number][0] if number < len(self._runs) else self.numel
            end = min(end, last)
            if first < end:
                yield first, place + first - begin, end - first
                first = end

    def views(self, first: int, last: int) -> List[torch.Tensor]:
        """Lists views of the memory that have the elements [first, last) in order."""
        return [self.memory.narrow(0, place, numel) for _, place, numel in self.between(first, last)]

    def read(self, first: int, last: int) -> torch.Tensor:
        """Returns the elements [first, last), 1-D: a view if they lie in one run, otherwise a copy."""
        views = self.views(first, last)
        return views[0] if len(views) == 1 else torch.cat([self.memory.new_empty(0), *views])

    def write(self, first: int, values: torch.Tensor) -> None:
        """Writes values, 1-D and of any dtype and device, to the elements from ``first`` on."""
        for piece in values.split(PIECE_NUMEL):
            views = self.views(first, first + piece.numel())
            first += piece.numel()
            if len(views) == 1:
                views[0].copy_(piece, non_blocking=True)
            elif views:
                parts = piece.to(self.device, non_blocking=True).split_with_sizes([view.numel() for view in views])
                torch._foreach_copy_(views, parts)

    def copy_to(self, target: torch.Tensor) -> None:
        """Copies all elements to a tensor, 1-D and of any dtype and device."""
        for first in range(0, self.numel, PIECE_NUMEL):
            last = min(first + PIECE_NUMEL, self.numel)
            target[first:last].copy_(self.read(first, last))


def in_one_run(memory: torch.Tensor) -> Runs:
    """Returns the elements of a partition that lie in 1-D memory one after the other."""
    return Runs(memory, [(0, 0)], memory.numel())


def in_flat_tensor(flat: torch.Tensor, layout: Layout) -> Runs:
    """Returns this rank's elements of a flat tensor."""
    runs = [(place.offset, place.first + layout.rank * place.shard) for place in layout.places if place.shard]
    return Runs(flat, runs, layout.partition_numel)


def own_parameters(optimizer: DeepSpeedZeroOptimizer, group: int) -> Runs:
    """Returns this rank's partition of a group's parameters, on whichever device they are."""
    alone = getattr(optimizer, "own_partitions", {}).get(group)
    if alone is not None:
        # The parameters are sharded.
        return in_one_run(alone)
    return in_flat_tensor(optimizer.bit16_groups_flat[group].data, layouts_of(optimizer)[group])
