# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps partitions by Adam where states or master weights have a form of our own.

With ``compile.optimizer_states: "8bit"`` a row is a block of codes. With ``compile.store_param_remainders`` master
weights are remainders. On a GPU, neither exists in fp32 outside the pass over memory. Elsewhere, torch steps short
ranges operator by operator.
"""

from typing import Any, Dict, Optional, Sequence, Tuple

import torch

from ...zero_1_and_2.step.rule import Partition
from . import adam
from .adam import AdamStep, is_fp32, kernel_for, names_of_states, new_state
from .adam_operators import Settings, step_rows
from .blockwise import SIGNED, has_moments, map_of, names_of, to_blocks, zeros
from .dynamic_map import BLOCK
from .own_ranges import keep_state

THIRD_STATE = "has no form for the third state of amsgrad=true; set amsgrad to false"


class EveryStepAdam:
    """The rule for all partitions of an engine. It makes every step, also the first, and the states in it.

    Args:
        in_8_bits: whether states are in 8 bits, instead of fp32.
        remainders: remainders of this rank's partitions, by parameter group, int16 1-D. ``Partition.new`` holds the
            parameters before the step then: the gradients lie elsewhere, because ``offload_optimizer`` is refused.
            None: master weights are in fp32.
    """

    def __init__(self, in_8_bits: bool = False, remainders: Optional[Sequence[torch.Tensor]] = None):
        self._step, self._remainders = EightBitStep if in_8_bits else EveryStep, remainders

    def begin(self, partition: Partition) -> Optional["EveryStep"]:
        if not partition.step_is_unpatched or partition.master.dtype != torch.float32:
            return None
        if self._step.problem_with(partition.optimizer) or (partition.state and not self._step.reads(partition)):
            return None
        step = self._step(partition, step_rows, kernel_for(partition.master))
        if self._remainders is not None:
            step.master = self._remainders[partition.index]
        return step


class EveryStep(AdamStep):
    """One step of one partition, whose states are in fp32."""

    # Each operator writes its result to memory.
    numel_on_host = 2**22

    @classmethod
    def problem_with(cls, optimizer: torch.optim.Optimizer) -> Optional[str]:
        """Returns why an optimizer cannot be stepped so, with a remedy, or None if it can."""
        return adam.problem_with(optimizer)

    @classmethod
    def reads(cls, partition: Partition) -> bool:
        """Whether a partition's states have this form, or are converted to it."""
        states = (partition.state.get(name) for name in names_of_states(partition))
        return all(is_fp32(state, partition.master) for state in states)

    def begin(self) -> Dict[str, Any]:
        """Makes the states in the first step."""
        partition = self.partition
        if not partition.state:
            keep_state(partition, {**new_state(partition), **self.first_states()})
        return partition.state

    def first_states(self) -> Dict[str, torch.Tensor]:
        """Returns the states that have values for elements, before the first step."""
        return {name: torch.zeros_like(self.partition.master.data) for name in names_of_states(self.partition)}


class EightBitStep(EveryStep):
    """One step of one partition, whose states are in 8 bits."""

    columns = BLOCK
    has_scales = True

    @classmethod
    def problem_with(cls, optimizer: torch.optim.Optimizer) -> Optional[str]:
        if any(group.get("amsgrad") for group in optimizer.param_groups) and adam.is_adam(optimizer):
            return THIRD_STATE
        return adam.problem_with(optimizer)

    @classmethod
    def reads(cls, partition: Partition) -> bool:
        return has_moments(partition.state)

    def begin(self) -> Dict[str, Any]:
        """Makes the states in the first step, and converts loaded states to 8 bits."""
        state = super().begin()
        to_blocks(state, self.partition.master)
        return state

    def first_states(self) -> Dict[str, torch.Tensor]:
        return zeros(self.partition.master)

    def make_settings(self, scalars: torch.Tensor) -> Settings:
        return Settings(scalars, tuple(map_of(state, self.master) for state in SIGNED))

    def states(self, state: Dict[str, Any], first: int, last: int) -> Tuple[Tuple[torch.Tensor, ...], ...]:
        """Returns codes and scales of the elements' blocks."""
        blocks = slice(first // BLOCK, last // BLOCK)
        codes, scales = zip(*map(names_of, SIGNED), strict=True)
        return tuple(state[name][blocks] for name in codes), tuple(state[name][blocks] for name in scales)
