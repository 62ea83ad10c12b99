# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Overrides methods of DeepSpeed's ZeRO-1/2 optimizer while its master weights are remainders."""

import functools
from typing import Container, Optional, Type

import torch

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.engine.state import EngineState
from ...zero_1_and_2.step.even_order import EvenOrder
from .links import link
from .masters import Masters

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
