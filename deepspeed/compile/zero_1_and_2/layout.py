# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a ZeRO-1/2 optimizer's parameters lie: in flat tensors, and in the partitions of ranks.

Each parameter group has one flat tensor, in which each parameter lies in one place. The elements of the group are
shared out among the ranks of its process group: each rank owns a partition, and all partitions have one size.
:class:`Layout` says which elements are in which partition, as the base cuts them. Our code asks it alone.
"""

import itertools
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.nn import Parameter

import deepspeed.comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


class Place(NamedTuple):
    """Where a parameter lies: ``numel`` elements from the element ``first`` of the flat tensor on."""

    parameter: Parameter
    first: int
    numel: int


class Piece(NamedTuple):
    """The part of one parameter that lies in one partition. All numbers are in elements.

    ``owner`` is the rank, in the group's process group, that owns the partition. The piece has ``numel`` elements. It
    begins at ``source_offset`` in the parameter, at ``offset`` in the partition, and at ``first`` in the flat tensor.
    """

    parameter: Parameter
    owner: int
    source_offset: int
    offset: int
    first: int
    numel: int

    @property
    def numbers(self) -> Tuple[int, int, int, int]:
        """What the reducer needs: owner, offsets in the parameter and in the partition, elements."""
        return self.owner, self.source_offset, self.offset, self.numel


class ViewSpec(NamedTuple):
    """One entry of ``averaged_gradients[group]``: a run of this rank's partition.

    ``offset`` (from the beginning of the partition) and ``numel`` are in elements. ``shape`` is the parameter's shape,
    or None if the run is padding or only a part of a parameter.
    """

    offset: int
    numel: int
    shape: Optional[torch.Size]
    is_padding: bool = False


class Layout:
    """The layout of one parameter group, as DeepSpeed makes it: partition r is the r-th part of the flat tensor.

    A parameter may straddle several partitions.

    Args:
        places: the places of the group's parameters, in the order of the flat tensor.
        world: the number of ranks in the group's process group.
        rank: this rank's number there.
        alignment: the number of elements to a multiple of which each partition is padded.

    Attributes:
        places: as above.
        rank: as above.
        partition_numel: elements of a partition, with padding.
        first: where this rank's partition begins in the flat tensor, in elements.
        pieces: the pieces of all parameters, in the order of the flat tensor. This is also the order of the pieces in
            each partition.
    """

    def __init__(self, places: Iterable[Place], world: int, rank: int, alignment: int):
        self.places = list(places)
        self.rank = rank
        end = max((place.first + place.numel for place in self.places), default=0)
        self.partition_numel = -(-end // (world * alignment)) * alignment
        self.first = rank * self.partition_numel
        self.pieces = [piece for place in self.places for piece in _cut(place, self.partition_numel)]

    def own_pieces(self) -> Iterator[Piece]:
        """Yields the pieces in this rank's partition, in its order."""
        return (piece for piece in self.pieces if piece.owner == self.rank)

    def by_parameter(self) -> Dict[int, List[Piece]]:
        """Returns id of a parameter -> its pieces, which ascend."""
        by_id = itertools.groupby(self.pieces, lambda piece: id(piece.parameter))
        return {identity: list(pieces) for identity, pieces in by_id}

    def view_specs(self) -> List[ViewSpec]:
        """Lists the runs that fill this rank's partition: pieces, and the padding between and after them."""
        specs, filled = [], 0
        for piece in self.own_pieces():
            if piece.offset > filled:
                specs.append(ViewSpec(filled, piece.offset - filled, None, is_padding=True))
            is_whole = piece.numel == piece.parameter.numel()
            specs.append(ViewSpec(piece.offset, piece.numel, piece.parameter.shape if is_whole else None))
            filled = piece.offset + piece.numel
        if filled < self.partition_numel:
            specs.append(ViewSpec(filled, self.partition_numel - filled, None, is_padding=True))
        return specs


def _cut(place, partition_numel):
    done = 0
    while done < place.numel:
        owner, offset = divmod(place.first + done, partition_numel)
        numel = min(place.numel - done, partition_numel - offset)
        yield Piece(place.parameter, owner, done, offset, place.first + done, numel)
        done += numel


def layouts_of(optimizer: DeepSpeedZeroOptimizer) -> List[Layout]:
    """Returns the layout of each parameter group: that of the engine's state, or as DeepSpeed has made it."""
    deepcompile = getattr(optimizer, "_deepcompile", None)
    if deepcompile is not None:
        return deepcompile.layouts
    layouts = [
        Layout(
            # A parameter whose data was moved to the host has no elements.
            [
                Place(parameter, first, like.numel())
                for parameter, first, like in zip(parameters, offsets, likes, strict=True)
            ],
            dist.get_world_size(process_group),
            dist.get_rank(process_group),
            optimizer.nccl_start_alignment_factor,
        )
        for parameters, offsets, likes, process_group in zip(
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_offsets,
            optimizer.round_robin_bit16_meta,
            optimizer.real_dp_process_group,
            strict=True,
        )
    ]
    # The base has computed it too.
    assert [layout.partition_numel for layout in layouts] == [int(numel) for numel in optimizer.partition_size]
    return layouts


def partition(optimizer: DeepSpeedZeroOptimizer, group: int) -> torch.Tensor:
    """Returns this rank's partition of a group's parameters, 1-D."""
    rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
    return optimizer.parallel_partitioned_bit16_groups[group][rank].data


def lies_in_flat_tensor(optimizer: DeepSpeedZeroOptimizer, group: int) -> bool:
    """Whether the data of each parameter of a group still lies at its place in the group's flat tensor."""
    flat = optimizer.bit16_groups_flat[group]
    if not flat.untyped_storage().nbytes():
        # The parameters are sharded: the part that shards them puts them in their place itself.
        return True
    first, size = flat.data_ptr(), flat.element_size()
    places = optimizer._deepcompile.layouts[group].places
    return all([place.parameter.data_ptr() == first + size * place.first for place in places])
