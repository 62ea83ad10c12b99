# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Segments of a unit's memory, each of which is cut into shards. Each rank keeps its own in one tensor.

Trained parameters of one parameter group are a segment, whose shards are this rank's partition of the group
(``even_order.py``). So are all frozen parameters of a unit: they are one run of bytes, whatever their dtypes.
"""

from typing import Iterator, List, Optional, Tuple

import torch
from torch.distributed import ProcessGroup

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.parameter.carrier import Awaitable, Carrier, carrier_of
from ...zero_1_and_2.parameter.runs import own_parameters

# Alignment of torch's allocators, in bytes. Generated code takes for granted that parameters are aligned to 16 bytes,
# as they are in the flat tensor.
ALIGN_BYTES = 64


def aligned(nbytes: int) -> int:
    """Returns the next multiple of ``ALIGN_BYTES``."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Segment:
    """A part of a unit's memory, in which runs of as many equal shards as there are ranks follow each other.

    Args:
        begin: where it begins in the unit's memory, in bytes.
        dtype: of the elements.
        shards: of each run, the elements of a shard, and where this rank's begins in ``own``.
        rank, world: this rank, and how many have shards.
        group: the parameter group; None: of frozen parameters.

    Attributes:
        own_numel: elements of this rank's shards.
        end: where it ends in the unit's memory, in bytes.
        own: this rank's shards, 1-D, and perhaps those of other segments. Set before the first gather, as ``carrier``.
        carrier: gathers them.
    """

    own: torch.Tensor
    carrier: Carrier

    def __init__(
        self,
        begin: int,
        dtype: torch.dtype,
        shards: List[Tuple[int, int]],
        rank: int,
        world: int,
        group: Optional[int] = None,
    ):
        self.begin, self.group, self.rank, self.world = begin, group, rank, world
        self._dtype, self._shards = dtype, shards
        self.own_numel = sum(numel for numel, _ in shards)
        self.end = begin + world * dtype.itemsize * self.own_numel

    def runs(self) -> Iterator[Tuple[int, int, int]]:
        """Yields (first element of the run in the segment, elements of a shard, offset in ``own``)."""
        first = 0
        for numel, offset in self._shards:
            yield first, numel, offset
            first += self.world * numel

    def memory(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the segment, 1-D. ``buffer``: of the unit, of bytes."""
        return buffer[self.begin : self.end].view(self._dtype)

    def gather(self, buffer: torch.Tensor) -> List[Awaitable]:
        """Begins to fill the segment with the shards of all ranks. Returns what to wait for."""
        runs = [(first, self.world * numel) for first, numel, _ in self.runs()]
        shards = [self.own.narrow(0, offset, numel) for _, numel, offset in self.runs()]
        return self.carrier.gather(self.memory(buffer), runs, shards)

    def keep_own_part(self, buffer: torch.Tensor) -> None:
        """Copies the values in the unit's memory into this rank's shards, when no other rank reads these any more."""
        self.carrier.before_write()
        memory = self.memory(buffer)
        for first, numel, offset in self.runs():
            self.own.narrow(0, offset, numel).copy_(memory.narrow(0, first + self.rank * numel, numel))

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Does the same with new values of a tensor, as bytes. It begins at ``begin`` in the unit's memory."""
        self.carrier.before_write()
        own, size = self.own.view(torch.uint8), self._dtype.itemsize
        for run, numel, offset in self.runs():
            place = self.begin + size * (run + self.rank * numel)
            first, last = max(begin, place), min(begin + values.numel(), place + size * numel)
            if first < last:
                there = size * offset + first - place
                own[there : there + last - first].copy_(values[first - begin : last - begin])


def take_partitions(
    optimizer: Optional[DeepSpeedZeroOptimizer], segments: List[Segment], process_group: ProcessGroup
) -> None:
    """Gives segments of trained parameters this rank's partitions, which it cuts out of the flat tensors unless
    ``from_host.py`` has cut them already. ``process_group``: carries nothing else."""
    for group, layout in enumerate([] if optimizer is None else optimizer.even_layouts):
        carrier, own = carrier_of(optimizer, group), optimizer.own_partitions.get(group)
        if own is None:
            own = carrier.partition(layout.partition_numel, optimizer.bit16_groups_flat[group])
            torch.cat([own.new_empty(0), *own_parameters(optimizer, group).views(0, layout.partition_numel)], out=own)
        else:
            own = carrier.take_in(own)
        carrier = carrier.beside(process_group)
        for segment in segments:
            if segment.group == group:
                segment.own, segment.carrier = own, carrier


def give_up_flats(optimizer: DeepSpeedZeroOptimizer, segments: List[Segment]) -> None:
    """Gives back the memory of the flat tensors, when no parameter lies there. They keep their shape."""
    # Only now: a set-up that raises before leaves the parameters in the flat tensors.
    optimizer.own_partitions.update({segment.group: segment.own for segment in segments})
    for group, layout in enumerate(optimizer.even_layouts):
        optimizer.bit16_groups_flat[group].untyped_storage().resize_(0)
        for piece in layout.own_pieces():
            links = piece.parameter._hp_mapping
            if links is not None:
                # It has a view of the flat tensor.
                links.lp_fragment = optimizer.own_partitions[group].narrow(0, piece.offset, piece.numel)
