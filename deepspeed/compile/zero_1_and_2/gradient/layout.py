# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The layout of parameters in the flat tensors of a ZeRO-1/2 optimizer.

Each parameter group has one flat tensor. The flat tensor is cut into as many partitions of equal size as there are
ranks, and rank r owns partition r. A parameter may straddle several partitions. The native ``cut_at_partitions()``
cuts a parameter into pieces, and all code of this file gets pieces from that function.
"""

import collections
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import Module, Parameter

import deepspeed.comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .native import reducer_module


class Piece(NamedTuple):
    """The part of one parameter that lies in one partition.

    ``owner`` is the rank, in the group's process group, that owns the partition. ``offset`` (from the beginning of the
    partition) and ``numel`` are in elements.
    """

    parameter: Parameter
    owner: int
    offset: int
    numel: int


class ViewSpec(NamedTuple):
    """One entry of ``averaged_gradients[group]``: a run of this rank's partition.

    ``offset`` (from the beginning of the partition) and ``numel`` are in elements. ``shape`` is the parameter's shape,
    or None if the run is padding or only a part of a parameter.
    """

    offset: int
    numel: int
    shape: Optional[torch.Size]
    is_padding: bool = False


def flat_layout(optimizer: DeepSpeedZeroOptimizer, group: int) -> Iterator[Tuple[Parameter, int]]:
    """Yields (parameter, its offset in elements) for a parameter group, in the order of the group's flat tensor."""
    return zip(optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets[group])


def registered_parameters(optimizer: DeepSpeedZeroOptimizer) -> List[Parameter]:
    """Lists the registered parameters in the order in which the reducer numbers them, which is that of the model.

    A model lists its parameters roughly in the order in which its forward uses them, and the reducer expects gradients
    in the reverse order. The optimizer has its parameters in another order, for example by parameter group.
    """
    place = {id(parameter): index for index, parameter in enumerate(optimizer.param_names)}
    groups = range(len(optimizer.bit16_groups))
    parameters = [parameter for group in groups for parameter, _ in flat_layout(optimizer, group)]
    return sorted(parameters, key=lambda parameter: place[id(parameter)])


def partially_trained_lookalikes(module: Module, registered: Sequence[Parameter]) -> List[Parameter]:
    """Lists trained parameters that look alike, of which only some are registered.

    The caller may train a parameter that no optimizer has. Layers that look alike share one graph, and no guard
    distinguishes a registered parameter from another one. Parameters look alike if modules of one class hold them
    under one name. Torch's own leaf layers do not count as holders, because the graph of their parent contains them.
    """
    known, places = {id(parameter) for parameter in registered}, collections.defaultdict(list)
    for holder in module.modules():
        if type(holder).__module__.startswith("torch.nn.") and next(holder.children(), None) is None:
            continue
        for name, parameter in holder.named_parameters():
            if parameter.requires_grad:
                places[type(holder), name, parameter.shape, parameter.dtype].append(parameter)
    mixed = (place for place in places.values() if len({id(parameter) in known for parameter in place}) == 2)
    return list({id(parameter): parameter for place in mixed for parameter in place}.values())


def pieces(optimizer: DeepSpeedZeroOptimizer, group: int) -> Iterator[Piece]:
    """Yields the pieces of a group's parameters in the order of the flat tensor."""
    cut, partition_numel = reducer_module().cut_at_partitions, int(optimizer.partition_size[group])
    for parameter, offset in flat_layout(optimizer, group):
        for owner, _, target_offset, numel in cut(offset, parameter.numel(), partition_numel):
            yield Piece(parameter, owner, target_offset, numel)


def view_specs(optimizer: DeepSpeedZeroOptimizer, group: int) -> List[ViewSpec]:
    """Lists the runs that fill this rank's partition of a group: pieces, and the padding between and after them."""
    rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
    specs, filled = [], 0
    for piece in pieces(optimizer, group):
        if piece.owner != rank:
            continue
        if piece.offset > filled:
            specs.append(ViewSpec(filled, piece.offset - filled, None, is_padding=True))
        is_whole = piece.numel == piece.parameter.numel()
        specs.append(ViewSpec(piece.offset, piece.numel, piece.parameter.shape if is_whole else None))
        filled = piece.offset + piece.numel
    partition_numel = int(optimizer.partition_size[group])
    if filled < partition_numel:
        specs.append(ViewSpec(filled, partition_numel - filled, None, is_padding=True))
    return specs


def partition_offset(optimizer: DeepSpeedZeroOptimizer, group: int) -> int:
    """Returns the offset of this rank's partition in a group's flat tensor, in elements."""
    return dist.get_rank(group=optimizer.real_dp_process_group[group]) * int(optimizer.partition_size[group])


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
    return all([parameter.data_ptr() == first + size * offset for parameter, offset in flat_layout(optimizer, group)])
