# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Takes an optimizer's elements from the base's order, and saves and loads them there.

An optimizer keeps the class :class:`InBaseOrder` when its engine is gone, because its elements stay in our order.
"""

import contextlib
import functools
from typing import Any, Dict, Iterator, List

import torch

import deepspeed.comm as dist
from deepspeed.checkpoint.constants import PARTITION_COUNT
from deepspeed.utils.mixed_precision_linkage import link_hp_params
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment

from ...zero_1_and_2.collectives import every_rank_raises
from ...zero_1_and_2.messages import warn
from ...zero_1_and_2.parameter.runs import own_parameters
from ...zero_1_and_2.step.even_order import EvenOrder
from .order import BaseOrder, base_orders

IN_SHARDS = "in even shards"
LOST = (
    "the states of parameter group {} begin anew: they cannot be cut, and were saved by another number of ranks or "
    "without DeepCompile"
)


class InBaseOrder(EvenOrder):
    """The methods of the base's ZeRO-1/2 optimizer that save, load and link elements."""

    # Attributes of the base's optimizer.
    single_partition_of_fp32_groups: List[torch.Tensor]
    bit16_groups_flat: List[torch.Tensor]
    _is_loading = False
    _refreshes = False  # whether a load takes the master weights from the parameters

    @functools.cached_property
    def base_orders(self) -> List[BaseOrder]:
        """The order of each parameter group on disk."""
        return base_orders(self, self.even_layouts)

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

    # From the base's order to ours ---------------------------------------------------------------------------------

    def masters_from_base(self, group: int) -> torch.Tensor:
        master, order = self.single_partition_of_fp32_groups[group], self.base_orders[group]
        state = self.optimizer.state.get(master, {}) if group not in self.whole_states else {}
        if _uncut(state, order.numel):
            warn(LOST.format(group))
            state.clear()
        for name in _per_element(state, order.numel):
            state[name] = order.to_even(state[name], state[name].device)
        return order.to_even(master.detach(), master.device)

    def is_in_our_order(self) -> None:
        # What the base saves of its own order. It has computed other numbers of parameters that were cut.
        self.groups_padding = [order.own_padding() for order in self.base_orders]
        self._link_in_base_order()
        self._param_slice_mappings = self._create_param_mapping()
        super().is_in_our_order()
        # Mixins of parts link what they keep themselves when they are ready.
        InBaseOrder._link_all_hp_params(self)

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def reload_states(self, *args, **kwargs) -> None:
        super().reload_states(*args, **kwargs)
        # The base cuts the flat tensors as if they were in its own order.
        self.forget_partitions_of_base()

    def _restore_from_bit16_weights(self) -> None:
        if self._is_loading:
            self._refreshes = True
            return
        super()._restore_from_bit16_weights()

    def state_dict(self) -> Dict[str, Any]:
        """Returns the base's state dict, with its tensors on the host. All ranks call it.

        States that cannot be cut, such as quantized ones, are in our order, under names that no optimizer reads.
        """
        before = self.single_partition_of_fp32_groups
        states = [*self._states()]
        try:
            self.single_partition_of_fp32_groups = [
                order.to_base(self.own_masters(group), "cpu") for group, order in enumerate(self.base_orders)
            ]
            for order, master, state, names in states:
                as_saved = {name: order.to_base(state[name], "cpu") for name in names}
                uncut = _uncut(state, order.layout.partition_numel)
                as_saved.update({_key(name, order): state[name] for name in uncut})
                others = {name: value for name, value in state.items() if name not in uncut}
                self.optimizer.state[master] = {**others, **as_saved}
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
                else:
                    self._refuse_other_experts(state_dict_list)
                super().load_state_dict(
                    state_dict_list, load_optimizer_states, load_from_fp32_weights, checkpoint_folder, *args, **kwargs
                )

    def _refuse_other_experts(self, state_dict_list):
        """Raises ValueError if experts lay on other numbers of ranks: their parts have the same sizes on each rank."""
        saved = (state_dict_list[dist.get_rank(self.dp_process_group)] or {}).get(PARTITION_COUNT)
        for index, group in enumerate(self.optimizer.param_groups):
            if group.get("moe") and saved is not None and saved[index] != self.partition_count[index]:
                raise ValueError(
                    f"each expert of parameter group {index} lay on {saved[index]} ranks when the checkpoint was "
                    f"saved, and lies on {self.partition_count[index]}; load it with the same ep_size or autoep_size"
                )

    @contextlib.contextmanager
    def _loading(self, states_too: bool) -> Iterator[None]:
        """Context in which master weights, and states if ``states_too``, are written in the base's order. At its end
        they are put into ours, unless it raised. All ranks enter it."""
        before, inner = self.single_partition_of_fp32_groups, self.optimizer
        kept = [(master, dict(state)) for _, master, state, _ in self._states()] if states_too else []
        for order, _, state, names in self._states() if states_too else ():
            for name in (*names, *_uncut(state, order.layout.partition_numel)):
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
            if group in self.whole_states:
                continue
            state = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][0], {})
            numels = order.numel, order.layout.partition_numel
            in_shards = [name for name in state if str(name).startswith(IN_SHARDS)]
            is_lost = not set(_uncut(state, *numels)) <= {*in_shards}
            for name in in_shards:
                value = state.pop(name)
                own_name = str(name).rpartition(" ")[2]
                is_lost |= name != _key(own_name, order)
                state[own_name] = value
            if is_lost:
                warn(LOST.format(group))
                state.clear()
            for name in _per_element(state, *numels):
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
    return sorted(name for name, value in state.items() if type(value) is torch.Tensor and _has(value, numels))


def _uncut(state, *numels):
    """Lists the names of such states of other classes, which may be cut nowhere, or not where parameters begin."""
    return [
        name
        for name, value in state.items()
        if torch.is_tensor(value) and type(value) is not torch.Tensor and _has(value, numels)
    ]


def _has(value, numels):
    return value.dim() == 1 and value.numel() in numels


def _key(name, order):
    return f"{IN_SHARDS} of {order.layout.world} ranks, {order.layout.partition_numel} elements: {name}"
