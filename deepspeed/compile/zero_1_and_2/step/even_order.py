# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Puts an optimizer's elements into the order of our layout.

:func:`adopt` changes the order in memory, for good: partitions stay so when the engine is gone. So an optimizer keeps
a class that is an :class:`EvenOrder`.
"""

import functools
import gc
from typing import Any, Collection, Dict, List, Type

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..collectives import every_rank_raises
from ..feature import classes
from ..gradient.native import users_of
from ..layout import Layout
from ..messages import log_notice
from ..parameter.carrier import carrier_of
from ..parameter.runs import own_parameters

OF_BEFORE = (
    "a tensor that was taken before the engine was compiled, such as a kept parameter.data, a state_dict() or the "
    "output of a forward with gradients, does not follow the parameters from now on; keep the parameters instead"
)


class EvenOrder(DeepSpeedZeroOptimizer):
    """The methods of the base's ZeRO-1/2 optimizer that ask where elements lie.

    Attributes:
        even_layouts: of each parameter group.
        own_partitions: group -> this rank's partition of sharded parameters, 1-D. Others lie in flat tensors.
        whole_states: indices of the groups whose states belong to no element.
    """

    even_layouts: List[Layout]
    own_partitions: Dict[int, torch.Tensor]
    whole_states: Collection[int]

    def masters_from_base(self, group: int) -> torch.Tensor:
        """Returns the master weights of a group in our order, and puts its states into it. Called on all ranks, once,
        while elements are in the base's order."""
        raise NotImplementedError

    def is_in_our_order(self) -> None:
        """Called once, on all ranks, when the elements of all groups are."""
        for group, layout in enumerate(self.even_layouts):
            self.partition_size[group] = layout.partition_numel
            self.params_in_partition[group] = [piece.parameter for piece in layout.own_pieces()]
        self.forget_partitions_of_base()

    def forget_partitions_of_base(self) -> None:
        """Drops the base's cuts of the flat tensors, which are in its own order."""
        self.parallel_partitioned_bit16_groups[:] = [[] for _ in self.even_layouts]

    def own_masters(self, group: int) -> torch.Tensor:
        """Returns the master weights of a group in our order, 1-D, which a part may keep in another form."""
        return self.single_partition_of_fp32_groups[group].detach()

    def link_states(self) -> None:
        """Called after a step, which may have made states: a part links parameters with them."""

    def _update_model_bit16_weights(self, group_index: int) -> None:
        flat, places = self.bit16_groups_flat[group_index], self.even_layouts[group_index].places
        for place, like in zip(places, self.round_robin_bit16_meta[group_index], strict=True):
            place.parameter.data = flat.narrow(0, place.first, place.numel).view(like.shape).data

    def _restore_from_bit16_weights(self) -> None:
        for group, master in enumerate(self.single_partition_of_fp32_groups):
            own_parameters(self, group).copy_to(master.data)

    def update_lp_params(self) -> None:
        for group, master in enumerate(self.single_partition_of_fp32_groups):
            # A part may have freed the master weights. Then the parameters have their new values already.
            if master.untyped_storage().nbytes() >= master.nbytes:
                own_parameters(self, group).write(0, master.data)


class _Unsaved(EvenOrder):
    """An optimizer whose elements no part exchanges with the base's order. It begins with those of the parameters."""

    def masters_from_base(self, group: int) -> torch.Tensor:
        master, layout = self.single_partition_of_fp32_groups[group], self.even_layouts[group]
        parameters = self.parallel_partitioned_bit16_groups[group][layout.rank]
        if self.optimizer.state.get(master) or not torch.equal(master, parameters.to(master)):
            self._refuse()
        values = master.new_zeros(layout.partition_numel)
        for piece in layout.own_pieces():
            source = piece.parameter.data.view(-1).narrow(0, piece.source_offset, piece.numel)
            values.narrow(0, piece.offset, piece.numel).copy_(source)
        return values

    def _link_all_hp_params(self) -> None:
        """Does nothing: parameters have no links."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("to save, load or move optimizer states, DeepCompile needs its part features.checkpoints")

    state_dict = load_state_dict = offload_states = reload_states = _refuse


def adopt(optimizer: DeepSpeedZeroOptimizer, layouts: List[Layout], whole_states: Collection[int]) -> None:
    """Puts master weights, states and parameters into the order of layouts, unless they are. All ranks call it.

    The optimizer's class becomes an :class:`EvenOrder`, unless it is one. A group's parameters are in memory twice
    meanwhile.

    Args:
        whole_states: indices of the groups whose states belong to no element.
    """
    if hasattr(optimizer, "even_layouts"):
        # A part has cut it while it was made, or an earlier engine has had it.
        optimizer.whole_states = whole_states
        return
    sharded = vars(optimizer).setdefault("own_partitions", {})
    optimizer.__class__ = even_class(type(optimizer))  # type: ignore[assignment,arg-type]
    assert isinstance(optimizer, EvenOrder)
    optimizer.even_layouts, optimizer.whole_states = layouts, whole_states
    kept = []  # of each group, whether the caller keeps tensors of the memory that it leaves
    for group, layout in enumerate(layouts):
        # Parameters that were cut while they came from the host are in our order already.
        if group not in sharded:
            kept.append(_adopt_group(optimizer, group, layout))
    if any(kept):
        # Each rank says so itself: one may be the only one on which somebody keeps a tensor.
        log_notice(OF_BEFORE, torch.distributed.get_rank())
    optimizer.is_in_our_order()


def _adopt_group(optimizer, group, layout):
    """Returns whether somebody else keeps memory of the parameters that the group has left."""
    master, flat = optimizer.single_partition_of_fp32_groups[group], optimizer.bit16_groups_flat[group]
    values = optimizer.masters_from_base(group)
    if optimizer.cpu_offload:
        with every_rank_raises("pin master weights", optimizer.real_dp_process_group[group]):
            # A host may have no memory to pin.
            if optimizer.cpu_offload_pin_memory:
                get_accelerator().unpin_memory(master)
                values = get_accelerator().pin_memory(values)
    master.data = values
    # Views of the base's flat tensor, which is to go.
    optimizer.parallel_partitioned_bit16_groups[group] = []
    for parameter in optimizer.bit16_groups[group]:
        parameter._hp_mapping = None
    optimizer.bit16_groups_flat[group] = moved = carrier_of(optimizer, group).flat_tensor(layout.flat_numel, flat)
    for place, like in zip(layout.places, optimizer.round_robin_bit16_meta[group], strict=True):
        there = moved.narrow(0, place.first, place.numel).view(like.shape)
        place.parameter.data = there.copy_(place.parameter.data)
    left = flat.untyped_storage()
    if users_of(left) > 1:
        # A graph that nobody needs any more may wait for Python's collector.
        gc.collect()
    return users_of(left) > 1


@functools.cache
def even_class(cls: Type[DeepSpeedZeroOptimizer]) -> Type[DeepSpeedZeroOptimizer]:
    """Returns a class of optimizers that is ``cls`` and an :class:`EvenOrder`."""
    if issubclass(cls, EvenOrder):
        return cls
    bases = [part.in_our_order for part in classes() if part.in_our_order is not None] or [_Unsaved]
    return type(f"Even{cls.__name__}", (*bases, cls), {})
