# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Links parameters with the optimizer's states of all groups, and again after states were loaded or moved.

DeepSpeed itself raises where a state cannot be cut, and keeps links to states that the optimizer has no longer.
"""

from typing import Callable, Dict, Iterator, List, Tuple

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from deepspeed.utils.tensor_fragment import tensor_fragment

from ...zero_1_and_2.layout import layouts_of


def links_of(optimizer: DeepSpeedZeroOptimizer) -> Iterator[tensor_fragment]:
    """Yields the base's links of parameters for ``safe_get_full_*``. A parameter need not have one."""
    links = (getattr(parameter, "_hp_mapping", None) for group in optimizer.bit16_groups for parameter in group)
    return (link for link in links if link is not None)


class LinkedStates:
    """Links parameters with states, and remembers which states were on the host before the others moved there.

    Attributes:
        in_other_forms: functions of parts that link states which the part keeps in a form of its own. They are called
            after the states that can be cut are linked.
    """

    def __init__(self) -> None:
        self.in_other_forms: List[Callable[[DeepSpeedZeroOptimizer], None]] = []
        # Optimizer states that were on the host before the others were moved there: (states of a parameter, name).
        self._on_host: List[Tuple[Dict, str]] = []

    def link_again(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Links parameters with the current states, after a load or a move of states."""
        optimizer._hp_optimizer_states_linked = False
        # The parameter groups whose states need not have the shape of master weights.
        transformed = optimizer._deepcompile.transformed
        masters = enumerate(optimizer.single_partition_of_fp32_groups)
        if all(optimizer.optimizer.state.get(master) for group, master in masters if group not in transformed):
            self.link(optimizer)

    def link(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Links parameters with states, unless they are linked. States that cannot be cut stay without links."""
        if optimizer._hp_optimizer_states_linked:
            return
        groups = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)
        for group, (parameters, master) in enumerate(groups):
            # Check the pieces of all ranks, which call safe_get_full_optimizer_state() together.
            layout = layouts_of(optimizer)[group]
            pieces = (place.piece(rank) for place in layout.places for rank in range(layout.world))
            spans = [(piece.offset, piece.numel) for piece in pieces if piece.numel]
            state = optimizer.optimizer.state[master].items()
            can_be_linked = group not in optimizer._deepcompile.transformed
            cut = {name: value for name, value in state if can_be_linked and _can_be_cut(value, spans)}
            lazy_init_hp_params_optimizer_state(parameters, master, {master: cut})
        optimizer._hp_optimizer_states_linked = True
        for link in self.in_other_forms:
            link(optimizer)

    def drop_links(self, optimizer: DeepSpeedZeroOptimizer, are_on_host: bool) -> None:
        """Called before states move to the host. ``are_on_host``: whether they are there already.

        The links are views of the states, and would keep the device memory of states that move.
        """
        if not are_on_host:
            self._on_host = [
                (state, name)
                for state in optimizer.optimizer.state.values()
                for name, value in state.items()
                if torch.is_tensor(value) and value.is_cpu
            ]
        for links in links_of(optimizer):
            if links.optim_fragment is not None:
                links.optim_fragment.clear()

    def return_to_host(self) -> None:
        """Called when the base has moved every tensor to the device.

        Torch's optimizers keep step counts on the host, because each step would have to wait for counts on the device.
        """
        for state, name in self._on_host:
            state[name] = state[name].cpu()
        self.forget_places()

    def forget_places(self) -> None:
        """Called when the states have moved back or were replaced."""
        self._on_host = []


def _can_be_cut(state, spans):
    """Whether a state is a tensor that can be cut into ``spans``, each (offset, elements)."""
    try:
        for offset, numel in spans:
            state.narrow(0, offset, numel)
    except Exception:
        return False
    return True
