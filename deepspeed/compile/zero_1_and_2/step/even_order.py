# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Puts an optimizer's elements into the order of our layout, and saves and loads them in the base's order.

:func:`adopt` changes the order in memory, for good: partitions stay so when the engine is gone. So an optimizer keeps
the class :class:`EvenOrder`, by which its checkpoints are those of DeepSpeed.
"""

import contextlib
import functools
from typing import Any, Collection, Dict, Iterator, List, Type

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.mixed_precision_linkage import link_hp_params
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment

from ..collectives import every_rank_raises
from ..layout import Layout
from ..parameter.carrier import carrier_of
from ..parameter.order import BaseOrder, base_orders
from ..parameter.runs import own_parameters


class EvenOrder(DeepSpeedZeroOptimizer):
    """The methods of the base's ZeRO-1/2 optimizer that ask where elements lie.

    Attributes:
        even_layouts: of each parameter group, in memory.
        own_partitions: group -> this rank's partition of sharded parameters, 1-D. Others lie in flat tensors.
        base_orders: of each parameter group, on disk.
        whole_states: indices of the groups whose states belong to no element.
    """

    even_layouts: List[Layout]
    own_partitions: Dict[int, torch.Tensor]
    base_orders: List[BaseOrder]
    whole_states: Collection[int]
    # Of the base.
    single_partition_of_fp32_groups: List[torch.Tensor]
    bit16_groups_flat: List[torch.Tensor]
    _is_loading = False
    _refreshes = False  # whether a load takes the master weights from the parameters

    def _update_model_bit16_weights(self, group_index: int) -> None:
        flat, places = self.bit16_groups_flat[group_index], self.even_layouts[group_index].places
        for place, like in zip(places, self.round_robin_bit16_meta[group_index], strict=True):
            place.parameter.data = flat.narrow(0, place.first, place.numel).view(like.shape).data

    # Links of parameters with master weights ----------------------------------------------------------------------

    def _link_all_hp_params(self) -> None:
        if self._is_loading:
            # Linked when it is loaded.
            return
        for group, layout in enumerate(self.even_layouts):
            own = own_parameters(self, group)
            number = 0
            for place in layout.places:
                piece = place.piece(layout.rank)
                self._link(group, place.parameter, piece.source_offset, piece.offset, piece.numel)
                if piece.numel:
                    place.parameter._index_in_param_group = number
                    number += 1
                    place.parameter._hp_mapping.lp_fragment = own.read(piece.offset, piece.offset + piece.numel)

    def _link_in_base_order(self) -> None:
        for group, order in enumerate(self.base_orders):
            for first, place in zip(order.firsts, order.layout.places, strict=True):
                begin = order.layout.rank * order.numel
                source = min(max(begin - first, 0), place.numel)
                numel = max(min(begin + order.numel - first, place.numel) - source, 0)
                self._link(group, place.parameter, source, first + source - begin, numel)

    def _link(self, group, parameter, source, offset, numel):
        """Links a parameter with ``numel`` elements of its group's master weights, which begin at ``offset``."""
        # The base's function, as for a parameter that has no elements in this partition.
        masters, process_group = self.single_partition_of_fp32_groups[group], self.real_dp_process_group[group]
        dicts = self.averaged_gradients, self.offload_gradient_dict
        link_hp_params([parameter], masters, *dicts, self.cpu_offload, group, -1, 0, process_group)
        if numel:
            parameter._hp_mapping = tensor_fragment(
                torch.empty(0),
                fragment_address(numel, source),
                masters.narrow(0, offset, numel),
                fragment_address(numel, offset),
                *dicts,
                self.cpu_offload,
                group,
            )

    # Master weights and parameters --------------------------------------------------------------------------------

    def _restore_from_bit16_weights(self) -> None:
        if self._is_loading:
            self._refreshes = True
            return
        for group, master in enumerate(self.single_partition_of_fp32_groups):
            master.data.copy_(own_parameters(self, group).read(0, master.numel()))

    def update_lp_params(self) -> None:
        """Of an engine that is not compiled yet, whose parameters are sharded."""
        for group, master in enumerate(self.single_partition_of_fp32_groups):
            own_parameters(self, group).write(0, master.data)

    def reload_states(self, *args, **kwargs) -> None:
        super().reload_states(*args, **kwargs)
        # The base cuts the flat tensors as if they were in its own order.
        self._forget_partitions_of_base()

    def _forget_partitions_of_base(self):
        self.parallel_partitioned_bit16_groups[:] = [[] for _ in self.even_layouts]

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """Returns the base's state dict, with its tensors on the host. All ranks call it."""
        before = self.single_partition_of_fp32_groups
        states = [*self._states()]
        try:
            self.single_partition_of_fp32_groups = [
                order.to_base(master.detach(), "cpu") for order, master in zip(self.base_orders, before, strict=True)
            ]
            for order, master, state, names in states:
                converted = {name: order.to_base(state[name], "cpu") for name in names}
                self.optimizer.state[master] = {**state, **converted}
            return super().state_dict()
        finally:
            self.single_partition_of_fp32_groups = before
            for _, master, state, _ in states:
                self.optimizer.state[master] = state

    def load_state_dict(
        self,
        state_dict_list: List[Dict[str, Any]],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: Any = None,
        *args,
        **kwargs,
    ) -> None:
        with self._loading(load_optimizer_states or bool(checkpoint_folder)), self._without_base_flat():
            with every_rank_raises("load a checkpoint", self.dp_process_group):
                if checkpoint_folder:
                    self._link_in_base_order()
                super().load_state_dict(
                    state_dict_list, load_optimizer_states, load_from_fp32_weights, checkpoint_folder, *args, **kwargs
                )

    @contextlib.contextmanager
    def _loading(self, states_too: bool) -> Iterator[None]:
        """Context in which master weights, and states if ``states_too``, are written in the base's order. At its end
        they are put into ours, unless it raised. All ranks enter it."""
        before, inner = self.single_partition_of_fp32_groups, self.optimizer
        kept = [(master, dict(state)) for _, master, state, _ in self._states()] if states_too else []
        for _, _, state, names in self._states() if states_too else ():
            for name in names:
                del state[name]
        self.single_partition_of_fp32_groups = [
            torch.zeros(order.numel, dtype=master.dtype, device="cpu")
            for order, master in zip(self.base_orders, before, strict=True)
        ]
        self._is_loading, self._refreshes = True, False
        try:
            yield
            loaded = self.single_partition_of_fp32_groups
            # Restored first: what follows is in our order.
            self.single_partition_of_fp32_groups, self._is_loading = before, False
            if self._refreshes:
                self._restore_from_bit16_weights()
            else:
                for order, values, master in zip(self.base_orders, loaded, before, strict=True):
                    master.data.copy_(order.to_even(values, values.device))
            if states_too:
                self._take_states()
        except BaseException:
            for master, state in kept:
                inner.state[master] = state
            raise
        finally:
            self.single_partition_of_fp32_groups, self._is_loading = before, False
            self._link_all_hp_params()

    @contextlib.contextmanager
    def _without_base_flat(self):
        """Context in which flat tensors have the base's number of elements, and no memory."""
        before = self.bit16_groups_flat
        self.bit16_groups_flat = [
            flat.new_empty(1).expand(order.layout.world * order.numel)
            for order, flat in zip(self.base_orders, before, strict=True)
        ]
        try:
            yield
        finally:
            self.bit16_groups_flat = before

    def _take_states(self):
        """Puts states that are in the base's order into ours."""
        for group, order in enumerate(self.base_orders):
            state = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][0], {})
            for name in _per_element(state, order.numel, self.optimizer.param_groups[group]["params"][0].numel()):
                if group not in self.whole_states:
                    state[name] = order.to_even(state[name], state[name].device)

    def _states(self):
        """Yields (order, master weights, state, names of those that have a value for each element) of groups."""
        for group, order in enumerate(self.base_orders):
            master = self.optimizer.param_groups[group]["params"][0]
            state = self.optimizer.state.get(master)
            if state and group not in self.whole_states:
                yield order, master, state, _per_element(state, order.layout.partition_numel)


def _per_element(state, *numels):
    """Lists the names of states that have a value for each element, in an order that is the same on all ranks."""
    return sorted(
        name
        for name, value in state.items()
        if torch.is_tensor(value) and value.dim() == 1 and value.numel() in numels
    )


def adopt(optimizer: DeepSpeedZeroOptimizer, layouts: List[Layout], whole_states: Collection[int]) -> None:
    """Puts master weights, states and parameters into the order of layouts, unless they are. All ranks call it.

    The optimizer's class becomes an :class:`EvenOrder`, unless it is one. A group's parameters are in memory twice
    meanwhile.

    Args:
        whole_states: indices of the groups whose states belong to no element.
    """
    if hasattr(optimizer, "base_orders"):
        # A part has cut it while it was made, or an earlier engine has had it.
        optimizer.whole_states = whole_states
        return
    sharded = vars(optimizer).setdefault("own_partitions", {})
    optimizer.__class__ = even_class(type(optimizer))  # type: ignore[assignment,arg-type]
    assert isinstance(optimizer, EvenOrder)
    optimizer.even_layouts, optimizer.whole_states = layouts, whole_states
    optimizer.base_orders = base_orders(optimizer, layouts)
    for group, order in enumerate(optimizer.base_orders):
        # Parameters that were cut while they came from the host are in our order already.
        if group not in sharded:
            _adopt_group(optimizer, group, order)
        optimizer.partition_size[group] = order.layout.partition_numel
        optimizer.params_in_partition[group] = [piece.parameter for piece in order.layout.own_pieces()]
    # What the base saves of its own order. It has computed other numbers of parameters that were cut.
    optimizer.groups_padding = [order.own_padding() for order in optimizer.base_orders]
    optimizer._link_in_base_order()
    optimizer._param_slice_mappings = optimizer._create_param_mapping()
    optimizer._forget_partitions_of_base()
    # Mixins of parts link what they keep themselves when they are ready.
    EvenOrder._link_all_hp_params(optimizer)


def _adopt_group(optimizer, group, order):
    master, flat = optimizer.single_partition_of_fp32_groups[group], optimizer.bit16_groups_flat[group]
    state = optimizer.optimizer.state.get(master, {}) if group not in optimizer.whole_states else {}
    for name in _per_element(state, order.numel):
        state[name] = order.to_even(state[name], state[name].device)
    values = order.to_even(master.detach(), master.device)
    if optimizer.cpu_offload and optimizer.cpu_offload_pin_memory:
        get_accelerator().unpin_memory(master)
        values = get_accelerator().pin_memory(values)
    master.data = values
    # Views of the base's flat tensor, which is to go.
    optimizer.parallel_partitioned_bit16_groups[group] = []
    for parameter in optimizer.bit16_groups[group]:
        parameter._hp_mapping = None
    optimizer.bit16_groups_flat[group] = moved = carrier_of(optimizer, group).flat_tensor(
        order.layout.flat_numel, flat
    )
    for place, like in zip(order.layout.places, optimizer.round_robin_bit16_meta[group], strict=True):
        there = moved.narrow(0, place.first, place.numel).view(like.shape)
        place.parameter.data = there.copy_(place.parameter.data)


@functools.cache
def even_class(cls: Type[DeepSpeedZeroOptimizer]) -> Type[DeepSpeedZeroOptimizer]:
    """Returns a class of optimizers that is ``cls`` and an :class:`EvenOrder`."""
    return cls if issubclass(cls, EvenOrder) else type(f"Even{cls.__name__}", (EvenOrder, cls), {})
