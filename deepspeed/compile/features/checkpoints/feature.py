# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed's, and links of parameters with master weights and states. Every engine has this part.

DeepSpeed itself raises where a state cannot be cut, and keeps links to states that the optimizer has no longer.
"""

import weakref
from typing import TYPE_CHECKING, Any, Callable, Container, Dict, List, Optional, Tuple

import torch

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

from ...zero_1_and_2.feature import Feature, SetUpContext
from ...zero_1_and_2.layout import layouts_of
from ...zero_1_and_2.parameter.carrier import carrier_of, carriers_of
from ...zero_1_and_2.step.optimizer import attached
from .in_base_order import InBaseOrder

if TYPE_CHECKING:
    # attach() puts the mixin before this class at run time.
    from ...zero_1_and_2.step.optimizer import StepLocalGradients as _NextClass
else:
    _NextClass = object


class SavedBetweenSteps(_NextClass):
    """The methods of the base's ZeRO-1/2 optimizer that save, load and move elements, of an engine that trains."""

    @property
    def _links(self) -> "Checkpoints":
        part = self._deepcompile.find(Checkpoints)
        assert part is not None
        return part

    def state_dict(self) -> Dict[str, Any]:
        self._deepcompile.refuse_after_interruption()
        if self in attached:
            # A set-up that failed half-way may have left master weights in two forms.
            self._deepcompile.refuse()
        self._deepcompile.gather.wait_all()
        return super().state_dict()

    def load_state_dict(self, *args, **kwargs) -> None:
        self._deepcompile.gather.wait_all()
        super().load_state_dict(*args, **kwargs)
        self._links.forget_places()
        self._links.link_again()
        # All parameters have the checkpoint's values now, and a new step begins.
        self._deepcompile.forget_interruption()
        self._deepcompile.backward.begin_anew()
        self._deepcompile.backward.drop_step()

    def offload_states(
        self, include: Optional[Container[OffloadStateTypeEnum]] = None, *args: Any, **kwargs: Any
    ) -> None:
        self._deepcompile.gather.refuse_to_offload(include)
        self._deepcompile.gather.wait_all()
        self._links.drop_links(OffloadStateTypeEnum.optim_states in self.offloaded_states)
        super().offload_states(include, *args, **kwargs)
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            for carrier in carriers_of(self).values():
                carrier.flats_have_left()
        self._links.link_again()

    def reload_states(self, *args, **kwargs) -> None:
        self._deepcompile.gather.wait_all()
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            # First: the base leaves what is on the device where it is.
            for group, flat in enumerate(self.bit16_groups_flat):
                flat.data = carrier_of(self, group).take_in(flat.data)
        super().reload_states(*args, **kwargs)
        self._links.return_to_host()
        self._links.link_again()

    def link_states(self) -> None:
        self._links.link()

    def _link_all_hp_params(self):
        super()._link_all_hp_params()
        # The new links lead to no states.
        self._hp_optimizer_states_linked = False


class Checkpoints(Feature):
    """Saves and loads in the base's order, which the ranks exchange with ours, and links parameters with states.

    Attributes:
        in_other_forms: functions of parts that link states which the part keeps in a form of its own. They are called
            after the states that can be cut are linked.
    """

    in_our_order: Optional[type] = InBaseOrder
    optimizer_mixins: Tuple[type, ...] = (SavedBetweenSteps,)

    def __init__(self, context: SetUpContext):
        self._optimizer = weakref.ref(context.optimizer)
        self.in_other_forms: List[Callable[[DeepSpeedZeroOptimizer], None]] = []
        # Optimizer states that were on the host before the others were moved there: (states of a parameter, name).
        self._on_host: List[Tuple[Dict, str]] = []

    def commit(self) -> None:
        # If the optimizer has stepped, the base has linked states in its own way, which the links would keep.
        self.link_again()

    def link_again(self) -> None:
        """Links parameters with the current states, after a load or a move of states."""
        optimizer = self._optimizer()
        optimizer._hp_optimizer_states_linked = False
        # The parameter groups whose states need not have the shape of master weights.
        transformed = optimizer._deepcompile.transformed
        masters = enumerate(optimizer.single_partition_of_fp32_groups)
        if all(optimizer.optimizer.state.get(master) for group, master in masters if group not in transformed):
            self.link()

    def link(self) -> None:
        """Links parameters with states, unless they are linked. States that cannot be cut stay without links."""
        optimizer = self._optimizer()
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

    def drop_links(self, are_on_host: bool) -> None:
        """Called before states move to the host. ``are_on_host``: whether they are there already.

        The links are views of the states, and would keep the device memory of states that move.
        """
        optimizer = self._optimizer()
        if not are_on_host:
            self._on_host = [
                (state, name)
                for state in optimizer.optimizer.state.values()
                for name, value in state.items()
                if torch.is_tensor(value) and value.is_cpu
            ]
        # A parameter need not have a link.
        links = [getattr(parameter, "_hp_mapping", None) for group in optimizer.bit16_groups for parameter in group]
        for link in links:
            if link is not None and link.optim_fragment is not None:
                link.optim_fragment.clear()

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


FEATURE = Checkpoints


def _can_be_cut(state, spans):
    """Whether a state is a tensor that can be cut into ``spans``, each (offset, elements)."""
    try:
        for offset, numel in spans:
            state.narrow(0, offset, numel)
    except Exception:
        return False
    return True
