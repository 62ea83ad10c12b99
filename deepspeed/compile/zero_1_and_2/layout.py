# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a ZeRO-1/2 optimizer's parameters lie: in flat tensors, and in the partitions of ranks.

Each parameter group has one flat tensor, in which each parameter lies in one place. Each parameter is cut into equal
shards, one for each rank of its process group: so every rank sends and receives as much as the others, whichever
parameters are used together. A rank's partition is its shards of all parameters, one after the other. :class:`Layout`
says which elements are in which partition. Our code asks it alone. On disk partitions are cut as the base cuts them.
"""

from typing import Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.nn import Parameter

import deepspeed.comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# Each shard has a multiple of so many elements: a block of 8-bit states, and more than a kernel reads at a time.
SHARD_MULTIPLE = 256


class Piece(NamedTuple):
    """A rank's shard of a parameter, without padding. All numbers are in elements.

    It begins at ``source_offset`` in the parameter, and at ``offset`` in the rank's partition.
    """

    parameter: Parameter
    source_offset: int
    offset: int
    numel: int


class Place(NamedTuple):
    """Where a parameter lies: ``numel`` elements from the element ``first`` of the flat tensor on.

    There are ``shard`` elements for each rank's shard, which begins at ``offset`` in the rank's partition. The last
    shards have padding, or nothing else.
    """

    parameter: Parameter
    first: int
    numel: int
    shard: int
    offset: int

    def piece(self, rank: int) -> Piece:
        """Returns the part of a rank of the group's process group. It may have no elements."""
        source = min(rank * self.shard, self.numel)
        numel = min(self.numel - source, self.shard)
        return Piece(self.parameter, source, self.offset, numel)


class ViewSpec(NamedTuple):
    """One entry of ``averaged_gradients[group]``: a piece in this rank's partition, or the padding.

    ``offset`` (from the beginning of the partition) and ``numel`` are in elements. ``shape`` is the parameter's shape,
    or None if the entry is padding or only a part of a parameter.
    """

    offset: int
    numel: int
    shape: Optional[torch.Size]
    is_padding: bool = False


class Layout:
    """The layout of one parameter group.

    Args:
        parameters: (parameter, its number of elements), in the order of the flat tensor.
        world: the number of ranks in the group's process group.
        rank: this rank's number there.

    Attributes:
        places: the places of the parameters, in this order, without gaps but for the shards' padding.
        partition_numel: elements of a partition, with padding.
    """

    def __init__(self, parameters: Iterable[Tuple[Parameter, int]], world: int, rank: int):
        self.world, self.rank = world, rank
        self.places: List[Place] = []
        offset = 0
        for parameter, numel in parameters:
            shard = -(-numel // (world * SHARD_MULTIPLE)) * SHARD_MULTIPLE
            self.places.append(Place(parameter, world * offset, numel, shard, offset))
            offset += shard
        self.partition_numel = offset

    @property
    def flat_numel(self) -> int:
        """Elements of the flat tensor."""
        return self.world * self.partition_numel

    def run(self, place: Place) -> Tuple[int, int]:
        """Returns (first element, elements) of a parameter's shards in the flat tensor."""
        return place.first, self.world * place.shard

    def own_pieces(self) -> Iterator[Piece]:
        """Yields the pieces in this rank's partition that have elements, in its order."""
        pieces = (place.piece(self.rank) for place in self.places)
        return (piece for piece in pieces if piece.numel)

    def view_specs(self) -> List[ViewSpec]:
        """Lists the pieces in this rank's partition and, as in the base, one entry for its padding behind them."""
        specs, padding = [], self.partition_numel
        for piece in self.own_pieces():
            is_whole = piece.numel == piece.parameter.numel()
            specs.append(ViewSpec(piece.offset, piece.numel, piece.parameter.shape if is_whole else None))
            padding -= piece.numel
        if padding:
            specs.append(ViewSpec(self.partition_numel - padding, padding, None, is_padding=True))
        return specs


def layouts_of(optimizer: DeepSpeedZeroOptimizer) -> List[Layout]:
    """Returns the layout of each parameter group: that of the engine's state, or the one that an engine would make."""
    layouts: Optional[List[Layout]] = getattr(optimizer, "even_layouts", None)
    if layouts is not None:
        return layouts
    return [
        Layout(
            # A parameter whose data was moved to the host has no elements.
            [(parameter, like.numel()) for parameter, like in zip(parameters, likes, strict=True)],
            dist.get_world_size(process_group),
            dist.get_rank(process_group),
        )
        for parameters, likes, process_group in zip(
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_meta,
            optimizer.real_dp_process_group,
            strict=True,
        )
    ]


def lies_in_flat_tensor(optimizer: DeepSpeedZeroOptimizer, group: int) -> bool:
    """Whether the data of each parameter of a group still lies at its place in the group's flat tensor."""
    flat = optimizer.bit16_groups_flat[group]
    if not flat.untyped_storage().nbytes():
        # The parameters are sharded: the part that shards them puts them in their place itself.
        return True
    first, size = flat.data_ptr(), flat.element_size()
    places = layouts_of(optimizer)[group].places
    return all([place.parameter.data_ptr() == first + size * place.first for place in places])
