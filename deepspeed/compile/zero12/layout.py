# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie in the flat tensors of a ZeRO-1/2 optimizer, and the views of this rank's gradients.

Each parameter group has one flat tensor. The flat tensor is cut into as many partitions of equal size as there are
ranks, and rank r owns partition r. A parameter may straddle several partitions. The native ``cut_at_partitions()``
cuts a parameter into pieces, and all code of this file gets pieces from that function.
"""

from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.nn import Parameter

import deepspeed.comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .native import HandedOver, reducer_module


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


def lies_in_flat_tensor(optimizer: DeepSpeedZeroOptimizer, group: int) -> bool:
    """Whether the data of each parameter of a group still lies at its place in the group's flat tensor."""
    flat = optimizer.bit16_groups_flat[group]
    first, size = flat.data_ptr(), flat.element_size()
    # A parameter without elements has no address.
    return all(
        [
            parameter.data_ptr() == first + size * offset or not parameter.numel()
            for parameter, offset in flat_layout(optimizer, group)
        ]
    )


def holds_its_parameters(optimizer: DeepSpeedZeroOptimizer) -> bool:
    """Whether an optimizer's parameters lie in its own flat tensors, and not in those of a later ZeRO-1/2 optimizer.

    True for an optimizer other than the ZeRO-1/2 optimizer.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return True
    return all(
        parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        for flat, group in zip(optimizer.bit16_groups_flat, optimizer.bit16_groups)
        for parameter in group[:1]
    )


class PartitionViews(list):
    """``averaged_gradients[group]``: views of the targets in this rank's partition, in partition order.

    The list also has an entry without elements for each run of padding. Attributes and methods have the names of the
    base's own entries, because the base's code and users' code look these names up. As in the base, a caller may put
    other tensors into the list: the step calls :meth:`read` first.

    Args:
        handed_over: the targets by their offset in the partition, in elements, each 1-D in the gradient accumulation
            dtype, with their views, and the 1-D tensor of ``partition_size`` elements in which all targets lie, if
            they share one. This object takes the targets out when somebody needs them one by one.
        specs: what :func:`view_specs` returned for the group.
        padding: a tensor without elements, in the dtype of the targets.
        release: a function that makes the reducer forget the targets.
        stay_on_host: whether targets lie in host memory for good, because the optimizer is there.
    """

    def __init__(
        self,
        handed_over: HandedOver,
        specs: List[ViewSpec],
        padding: torch.Tensor,
        release: Callable[[], None],
        stay_on_host: bool = False,
    ):
        super().__init__()
        self.flat_partition = handed_over.flat
        self._handed_over: Optional[HandedOver] = handed_over
        self._taken: Dict[int, torch.Tensor] = {}
        self._specs = specs
        self._padding = padding.cpu() if stay_on_host else padding
        self._release = release
        self._stay_on_host = stay_on_host
        self._fill(handed_over.take_views())

    @property
    def _targets(self) -> Dict[int, torch.Tensor]:
        if self._handed_over is not None:
            self._taken, self._handed_over = self._handed_over.take_targets(), None
        return self._taken

    def _fill(self, views):
        views = iter(views)
        self[:] = [self._entry_of_padding() if spec.is_padding else next(views) for spec in self._specs]

    def _entry_of_padding(self):
        # Padding has no target, but an entry must keep its place: the base finds parameters by position.
        entry = self._padding.detach()
        # The norm skips views with this mark, so that the other views pair up with the parameters.
        entry._zero_padding = True
        return entry

    def _cut(self):
        pieces = [spec for spec in self._specs if not spec.is_padding]
        shapes = [(spec.numel,) if spec.shape is None else spec.shape for spec in pieces]
        self._fill(self._targets[spec.offset].view(shape) for spec, shape in zip(pieces, shapes, strict=True))

    def without_padding(self) -> List[torch.Tensor]:
        """Lists the views that are no padding, one for each parameter in this rank's partition."""
        return [view for view, spec in zip(self, self._specs, strict=True) if not spec.is_padding]

    def read(self, entries: Any, name: str) -> None:
        """Makes each entry whose memory is not its target's the new target. Called before a step.

        Args:
            entries: this list, to which the caller may have assigned, or what the caller has put in its place.
            name: of the list, for an error.

        Raises:
            ValueError: if this is no list with a tensor, of as many elements as the target, for each entry.
        """
        if entries is self and self._is_as_made():
            return
        if not isinstance(entries, (list, tuple)) or len(entries) != len(self._specs):
            raise ValueError(
                f"{name} is no list of {len(self._specs)} tensors; assign a tensor to an entry of the list"
            )
        changed = {}
        for index, (spec, entry) in enumerate(zip(self._specs, entries, strict=True)):
            if spec.is_padding:
                continue
            if not isinstance(entry, torch.Tensor) or entry.numel() != spec.numel:
                raise ValueError(f"{name}[{index}] is no tensor of {spec.numel} elements; assign one")
            if not self._is_target(spec.offset, entry):
                # With offloading, new parameters are written over targets, whose memory this entry may share: copy.
                target = entry.detach().to(self._padding.device, self._padding.dtype, copy=self._stay_on_host)
                changed[spec.offset] = target.contiguous().view(-1)
        if changed:
            self._taken = {**self._targets, **changed}
            self.flat_partition = None
        if changed or entries is not self:
            self._cut()

    def _is_as_made(self):
        """Whether :meth:`read` would find nothing new. One native call tells of all entries."""
        handed_over = self._handed_over
        return (
            handed_over is not None and len(self) == len(self._specs) and handed_over.are_views(self.without_padding())
        )

    def _is_target(self, offset, entry):
        """Whether ``entry`` still has its target's memory. Assigning ``.data``, of either, changes that."""
        flat = self.flat_partition
        first = self._targets[offset].data_ptr() if flat is None else flat.data_ptr() + offset * flat.element_size()
        return entry.data_ptr() == first and entry.dtype == self._padding.dtype and entry.is_contiguous()

    def move_flat_partition(self, device: torch.device, non_blocking: bool = False) -> None:
        """Moves the gradients to ``device``. The base calls this in ``offload_states()`` and ``reload_states()``."""
        if self._stay_on_host:
            return
        self.read(self, "averaged_gradients")
        self._padding = self._padding.to(device)
        if self.flat_partition is None:
            for target in self._targets.values():
                target.data = target.data.to(device, non_blocking=non_blocking)
        else:
            flat = self.flat_partition
            flat.data = flat.data.to(device, non_blocking=non_blocking)
            for offset, target in self._targets.items():
                target.data = flat.data.narrow(0, offset, target.numel())
        self._cut()

    def take(self) -> Iterator[Tuple[int, torch.Tensor]]:
        """Yields (offset in elements, 1-D target) for each target, and leaves this list empty.

        This object and the reducer drop their references, so the memory of a target is free as soon as the caller
        drops the target.
        """
        targets = self._targets
        self.release_grad_buffers()
        while targets:
            yield targets.popitem()

    def release_grad_buffers(self) -> None:
        """Makes this object and the reducer drop the gradients. Repeated calls are allowed."""
        self.clear()
        self.flat_partition = self._handed_over = None
        self._taken = {}
        self._release()
