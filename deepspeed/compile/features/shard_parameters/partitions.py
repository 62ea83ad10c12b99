# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trained parameters of which each rank keeps its own shards alone.

ZeRO-1/2 has a flat tensor of each parameter group on every rank. Here this rank's shards become a tensor of their own,
its partition, and the flat tensor keeps its shape and loses its memory. Whole parameters lie in the memory of their
units, as long as these are gathered.
"""

import weakref
from typing import TYPE_CHECKING, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import torch
from torch.nn import Parameter

from ...zero_1_and_2.layout import Place, layouts_of
from ...zero_1_and_2.parameter.carrier import Awaitable, Carrier, carrier_of
from ...zero_1_and_2.parameter.runs import own_parameters
from .places import TensorSlot

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# Alignment of torch's allocators, in bytes. Generated code takes for granted that parameters are aligned to 16 bytes,
# as they are in the flat tensor.
ALIGN_BYTES = 64


def aligned(nbytes: int) -> int:
    """Returns the next multiple of ``ALIGN_BYTES``."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Partitions:
    """This rank's shards of the trained parameters of all groups.

    Args:
        optimizer: a ZeRO-1/2 optimizer. Only a weak reference is kept.
        process_group: of the ranks that share them, which carries nothing else.

    Attributes:
        own: parameter group -> its shards, 1-D. Empty before :meth:`take_over`.
    """

    def __init__(self, optimizer: "DeepSpeedZeroOptimizer", process_group: "ProcessGroup"):
        self._optimizer, self._process_group = weakref.ref(optimizer), process_group
        self.own: Dict[int, torch.Tensor] = {}
        self._carriers: Dict[int, Carrier] = {}  # parameter group -> what gathers its shards

    def take_over(self) -> None:
        """Copies this rank's shards out of the flat tensors, unless ``from_host.py`` has cut them already."""
        optimizer = self._optimizer()
        for group, layout in enumerate(optimizer.even_layouts):
            carrier, alone = carrier_of(optimizer, group), optimizer.own_partitions.get(group)
            if alone is None:
                flat = optimizer.bit16_groups_flat[group]
                alone = carrier.partition(layout.partition_numel, flat)
                views = own_parameters(optimizer, group).views(0, layout.partition_numel)
                if views:
                    torch.cat(views, out=alone)
            else:
                alone = carrier.take_in(alone)
            self.own[group], self._carriers[group] = alone, carrier.beside(self._process_group)

    def gather(
        self, group: int, memory: torch.Tensor, runs: Sequence[Tuple[int, int]], places: Sequence[Place]
    ) -> List[Awaitable]:
        """Begins to fill runs of memory, 1-D, with the shards of all ranks. Returns what to wait for."""
        shards = [self.own[group].narrow(0, place.offset, place.shard) for place in places]
        return self._carriers[group].gather(memory, runs, shards)

    def to_write(self, group: int) -> torch.Tensor:
        """Returns this rank's shards of a parameter group, when no other rank reads them any more."""
        self._carriers[group].before_write()
        return self.own[group]

    def give_up_flat(self) -> None:
        """Gives back the memory of the flat tensors, when no parameter lies there."""
        optimizer = self._optimizer()
        optimizer.own_partitions.update(self.own)
        for flat in optimizer.bit16_groups_flat:
            flat.untyped_storage().resize_(0)
        # Links have views of the flat tensor.
        for group, layout in enumerate(optimizer.even_layouts):
            for piece in layout.own_pieces():
                links = piece.parameter._hp_mapping
                if links is not None:
                    links.lp_fragment = self.own[group].narrow(0, piece.offset, piece.numel)


class _OfGroup(NamedTuple):
    """The parameters of a unit in one parameter group."""

    group: int
    dtype: torch.dtype
    begin: int  # in the unit's memory, in bytes
    end: int
    world: int
    rank: int
    places: List[Place]

    def runs(self) -> Iterator[Tuple[int, int]]:
        """Yields (first, elements) of the memory of each parameter, counted from ``begin``, with its padding."""
        first = 0
        for place in self.places:
            yield first, self.world * place.shard
            first += self.world * place.shard

    def memory(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.begin : self.end].view(self.dtype)


class TrainedPart:
    """The trained parameters of a unit: where they lie, and how they are gathered.

    Args:
        optimizer: a ZeRO-1/2 optimizer.
        partitions: of this rank.
        parameters: name -> parameter, of the unit.
        begin: where these may lie in the unit's memory, in bytes.

    Attributes:
        slots: of the parameters.
        end: where they end in the unit's memory, in bytes.
    """

    def __init__(
        self,
        optimizer: "DeepSpeedZeroOptimizer",
        partitions: Partitions,
        parameters: Dict[str, Parameter],
        begin: int,
    ):
        self._partitions = partitions
        self._groups: List[_OfGroup] = []
        self.slots: List[TensorSlot] = []
        names = {id(parameter): name for name, parameter in parameters.items()}
        for group, (layout, flat) in enumerate(zip(layouts_of(optimizer), optimizer.bit16_groups_flat, strict=True)):
            places = [place for place in layout.places if id(place.parameter) in names]
            if not places:
                continue
            size, first = flat.element_size(), begin
            for place in places:
                name = names[id(place.parameter)]
                end = first + place.numel * size
                self.slots.append(TensorSlot(name, place.parameter, first, end, is_trained=True))
                first += layout.world * place.shard * size
            self._groups.append(_OfGroup(group, flat.dtype, begin, first, layout.world, layout.rank, places))
            begin = aligned(first)
        self.end = begin

    def gather(self, buffer: torch.Tensor) -> List[Awaitable]:
        """Begins to gather the parameters into the unit's memory. Returns what to wait for."""
        works: List[Awaitable] = []
        for of_group in self._groups:
            memory = of_group.memory(buffer)
            works += self._partitions.gather(of_group.group, memory, [*of_group.runs()], of_group.places)
        return works

    def keep_own_part(self, buffer: torch.Tensor) -> None:
        """Makes the values that the parameters have in the unit's memory those of this rank's shards."""
        for of_group in self._groups:
            memory, own = of_group.memory(buffer), self._partitions.to_write(of_group.group)
            for (first, _), place in zip(of_group.runs(), of_group.places, strict=True):
                there = memory.narrow(0, first + of_group.rank * place.shard, place.shard)
                own.narrow(0, place.offset, place.shard).copy_(there)

    def write(self, slot: TensorSlot, values: torch.Tensor) -> None:
        """Makes values, of the parameter's shape, those of this rank's shard of a parameter."""
        for of_group in self._groups:
            for place in of_group.places:
                if place.parameter is slot.tensor:
                    piece = place.piece(of_group.rank)
                    source = values.expand(slot.shape).reshape(-1).narrow(0, piece.source_offset, piece.numel)
                    own = self._partitions.to_write(of_group.group)
                    own.narrow(0, piece.offset, piece.numel).copy_(source)
