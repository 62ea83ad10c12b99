# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The methods of DeepSpeed's ZeRO-1/2 optimizer, and its links of parameters, while master weights are remainders."""

import functools
import weakref
from typing import Container, Optional, Type

import torch

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import tensor_fragment

from ...zero_1_and_2.engine.state import EngineState
from ...zero_1_and_2.step.even_order import EvenOrder
from .masters import Masters, parameters_of

_HP_PARAMS = OffloadStateTypeEnum.hp_params


class RemaindersOfParameters(EvenOrder):
    """The methods of the base's ZeRO-1/2 optimizer that read or write master weights."""

    masters_as_remainders: Masters
    _deepcompile: EngineState

    def own_masters(self, group: int) -> torch.Tensor:
        return self.masters_as_remainders.on_the_host(group)

    def load_state_dict(self, *args, **kwargs) -> None:
        with self.masters_as_remainders.written_on_host():
            super().load_state_dict(*args, **kwargs)

    def _restore_from_bit16_weights(self) -> None:
        if self.masters_as_remainders.on_host:
            super()._restore_from_bit16_weights()
        else:
            self.masters_as_remainders.take_parameters()

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        link(self, self.masters_as_remainders)

    def offload_states(
        self,
        include: Optional[Container[OffloadStateTypeEnum]] = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        if _HP_PARAMS not in self.offloaded_states and (include is None or _HP_PARAMS in include):
            self.masters_as_remainders.offload(pin_memory, non_blocking)
            # The base offloads states that are not in this set.
            self.offloaded_states.add(_HP_PARAMS)
        super().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        if _HP_PARAMS in self.offloaded_states:
            self.masters_as_remainders.reload(non_blocking)
        super().reload_states(non_blocking)


@functools.cache
def _with_remainders(cls: Type[DeepSpeedZeroOptimizer]) -> Type[DeepSpeedZeroOptimizer]:
    return type(f"Remainders{cls.__name__}", (RemaindersOfParameters, cls), {})


def use_remainders(optimizer: DeepSpeedZeroOptimizer, masters: Masters) -> None:
    """Splits master weights and frees their memory. The optimizer is a :class:`RemaindersOfParameters`."""
    masters.take_apart()
    optimizer.masters_as_remainders = masters  # type: ignore[attr-defined]
    # The state dict of a destroyed engine's optimizer must have the master weights too.
    optimizer.plain_class = _with_remainders(optimizer.plain_class)  # type: ignore[attr-defined]
    link(optimizer, masters)


# Links of parameters with master weights, for ``safe_get_full_fp32_param()`` and what sets them --------------------


class Fragment(tensor_fragment):
    """The part of a parameter in this rank's partition. Each read computes its master weights."""

    masters: Masters

    @property
    def hp_fragment(self) -> torch.Tensor:
        address = self.hp_fragment_address
        # A caller may have changed the parameter, which is a part of the master weight.
        self.masters.gather.wait_all()
        return self.masters.get(self.param_group_index, address.start, address.start + address.numel)

    def update_hp(self) -> None:
        self.masters.set(self.param_group_index, self.hp_fragment_address.start, self.lp_fragment)

    def update_lp(self) -> None:
        """Does nothing: the parameter is a part of its master weight."""


def link(optimizer: DeepSpeedZeroOptimizer, masters: Masters) -> None:
    """Called after the base has linked parameters with its own tensors. Links them with the master weights."""
    reference = weakref.ref(optimizer)
    for group in optimizer.bit16_groups:
        for parameter in group:
            if parameter._hp_mapping is not None:
                # The base's view would keep the memory of the fp32 master weights.
                vars(parameter._hp_mapping).pop("hp_fragment", None)
                parameter._hp_mapping.__class__ = Fragment
                parameter._hp_mapping.masters = masters
            parameter.set_full_hp_param = functools.partial(_set, reference, parameter, parameter.set_full_hp_param)


def _set(reference, parameter, function, value, optim_state_key=None):
    """Does ``function`` for a parameter: the base's method, or another part's in its place.

    Every rank gets the whole value. The parameter is a part of its master weight, so it has its new value at once, on
    all ranks, and not only after the next step.
    """
    if optim_state_key is not None:
        function(value, optim_state_key)
        return
    optimizer = reference()
    deepcompile = getattr(optimizer, "_deepcompile", None)
    if deepcompile is None:
        # The engine was destroyed, and nothing trains its master weights.
        return
    optimizer.masters_as_remainders.refuse_offloaded("set a master weight")
    # Parameters may still be on their way from the ranks that have stepped them.
    deepcompile.gather.wait_all()
    parameter.data.copy_(parameters_of(value, parameter.device).view_as(parameter))
    mapping = parameter._hp_mapping
    if mapping is not None:
        there = mapping.lp_fragment_address
        own = value.detach().flatten()[there.start : there.start + there.numel]
        mapping.masters.set(mapping.param_group_index, mapping.hp_fragment_address.start, own)
