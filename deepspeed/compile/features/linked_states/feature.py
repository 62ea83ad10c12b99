# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Parameters are linked with the optimizer's states of all groups, and anew when states were loaded or moved.

DeepSpeed itself raises where a state cannot be cut, and goes on with links to states that are no longer the
optimizer's.
"""

import abc
from typing import TYPE_CHECKING, Any, Container, Dict, List, Optional, Tuple

import torch

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

from ...zero_1_and_2.feature import Feature, SetUpContext
from ...zero_1_and_2.gradient.layout import pieces
from ...zero_1_and_2.step.optimizer import links_of

if TYPE_CHECKING:
    # attach() puts the mixin before this class at run time.
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as _NextClass

    from ...zero_1_and_2.engine.state import EngineState
else:
    _NextClass = object


class LinksStates(_NextClass):
    """The methods of the base's ZeRO-1/2 optimizer that link parameters with states, or make links stale."""

    _deepcompile: "EngineState"
    _hp_optimizer_states_linked: bool

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        if not self._hp_optimizer_states_linked:
            _part(self).link(self)

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        # The new links lead to no states.
        self._hp_optimizer_states_linked = False

    def load_state_dict(self, *args, **kwargs) -> None:
        super().load_state_dict(*args, **kwargs)
        _part(self).forget_places()
        _part(self).link_again(self)

    def offload_states(
        self, include: Optional[Container[OffloadStateTypeEnum]] = None, *args: Any, **kwargs: Any
    ) -> None:
        if OffloadStateTypeEnum.optim_states not in self.offloaded_states:
            _part(self).note_states_on_host(self)
        # The links are views of the states, and would keep the memory of those that move: drop the links before the
        # base gives memory back, and link what there is then.
        for links in links_of(self):
            if links.optim_fragment is not None:
                links.optim_fragment.clear()
        super().offload_states(include, *args, **kwargs)
        _part(self).link_again(self)

    def reload_states(self, *args, **kwargs) -> None:
        super().reload_states(*args, **kwargs)
        _part(self).return_to_host()
        _part(self).link_again(self)


class HasStates(Feature, abc.ABC):
    """A part that keeps states in a form that is linked otherwise."""

    @abc.abstractmethod
    def link_states(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Called when parameters were linked with the states that have the shape of the master weights. Links the
        others."""


class LinkedStates(Feature):
    """Links, and remembers which states were on the host before states moved there."""

    optimizer_mixin = LinksStates

    def __init__(self, context: SetUpContext):
        # Optimizer states that were on the host before the others were moved there: (states of a parameter, name).
        self._on_host: List[Tuple[Dict, str]] = []

    def attached(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        # If the optimizer has stepped, the base has linked fp32 states, which the links would keep.
        self.link_again(optimizer)

    def link_again(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Links parameters with the states that there are after a load or a move of states, to the host too."""
        optimizer._hp_optimizer_states_linked = False
        # The parameter groups whose states need not have the shape of master weights.
        transformed = optimizer._deepcompile.transformed
        masters = enumerate(optimizer.single_partition_of_fp32_groups)
        if all(optimizer.optimizer.state.get(master) for group, master in masters if group not in transformed):
            self.link(optimizer)

    def link(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Links parameters with their states, but only with states that can be cut, as some in blocks cannot."""
        groups = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)
        for group, (parameters, master) in enumerate(groups):
            # Of all ranks, because all ranks call safe_get_full_optimizer_state() together.
            spans = [(piece.offset, piece.numel) for piece in pieces(optimizer, group)]
            state = optimizer.optimizer.state[master].items()
            can_be_linked = group not in optimizer._deepcompile.transformed
            cut = {name: value for name, value in state if can_be_linked and _can_be_cut(value, spans)}
            lazy_init_hp_params_optimizer_state(parameters, master, {master: cut})
        optimizer._hp_optimizer_states_linked = True
        for part in optimizer._deepcompile.features:
            if isinstance(part, HasStates):
                part.link_states(optimizer)

    def note_states_on_host(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Called before states are moved to the host."""
        self._on_host = [
            (state, name)
            for state in optimizer.optimizer.state.values()
            for name, value in state.items()
            if torch.is_tensor(value) and value.is_cpu
        ]

    def return_to_host(self) -> None:
        """Called when the base has moved every tensor to the device.

        Torch's optimizers keep their counts of steps on the host, because each step would have to wait for counts on
        the device.
        """
        for state, name in self._on_host:
            state[name] = state[name].cpu()
        self.forget_places()

    def forget_places(self) -> None:
        """Called when states are where they were, or are others."""
        self._on_host = []


def _part(optimizer):
    return optimizer._deepcompile.find(LinkedStates)


def _can_be_cut(state, spans):
    """Whether a state is a tensor that can be cut into ``spans``, each (offset, elements)."""
    try:
        for offset, numel in spans:
            state.narrow(0, offset, numel)
    except Exception:
        return False
    return True


FEATURE = LinkedStates
