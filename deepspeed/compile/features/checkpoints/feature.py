# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed's, and links of parameters with master weights and states. Every engine has this part."""

import weakref
from typing import TYPE_CHECKING, Any, Container, Dict, Optional, Tuple

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from ...zero_1_and_2.feature import Feature, SetUpContext
from ...zero_1_and_2.parameter.carrier import carrier_of, carriers_of
from ...zero_1_and_2.step.optimizer import attached
from .in_base_order import InBaseOrder
from .linked_states import LinkedStates

if TYPE_CHECKING:
    # attach() puts the mixin before this class at run time.
    from ...zero_1_and_2.step.optimizer import StepLocalGradients as _NextClass
else:
    _NextClass = object


class SavedBetweenSteps(_NextClass):
    """The methods of the base's ZeRO-1/2 optimizer that save, load and move elements, of an engine that trains."""

    @property
    def _links(self) -> LinkedStates:
        part = self._deepcompile.find(Checkpoints)
        assert part is not None
        return part.links

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
        self._links.link_again(self)
        # All parameters have the checkpoint's values now, and a new step begins.
        self._deepcompile.forget_interruption()
        self._deepcompile.backward.begin_anew()
        self._deepcompile.backward.drop_step()

    def offload_states(
        self, include: Optional[Container[OffloadStateTypeEnum]] = None, *args: Any, **kwargs: Any
    ) -> None:
        self._deepcompile.gather.refuse_to_offload(include)
        self._deepcompile.gather.wait_all()
        self._links.drop_links(self, OffloadStateTypeEnum.optim_states in self.offloaded_states)
        super().offload_states(include, *args, **kwargs)
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            for carrier in carriers_of(self).values():
                carrier.flats_have_left()
        self._links.link_again(self)

    def reload_states(self, *args, **kwargs) -> None:
        self._deepcompile.gather.wait_all()
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            # First: the base leaves what is on the device where it is.
            for group, flat in enumerate(self.bit16_groups_flat):
                flat.data = carrier_of(self, group).take_in(flat.data)
        super().reload_states(*args, **kwargs)
        self._links.return_to_host()
        self._links.link_again(self)

    def link_states(self) -> None:
        self._links.link(self)

    def _link_all_hp_params(self):
        super()._link_all_hp_params()
        # The new links lead to no states.
        self._hp_optimizer_states_linked = False


class Checkpoints(Feature):
    """Saves and loads in the base's order, which the ranks exchange with ours.

    Attributes:
        links: of parameters with states.
    """

    in_our_order: Optional[type] = InBaseOrder
    optimizer_mixins: Tuple[type, ...] = (SavedBetweenSteps,)

    def __init__(self, context: SetUpContext):
        self.links, self._optimizer = LinkedStates(), weakref.ref(context.optimizer)

    def commit(self) -> None:
        # If the optimizer has stepped, the base has linked states in its own way, which the links would keep.
        self.links.link_again(self._optimizer())


FEATURE = Checkpoints
