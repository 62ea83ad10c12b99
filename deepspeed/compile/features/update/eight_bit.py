# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps partitions by Adam with states in 8 bits: ``compile.optimizer_states: "8bit"``.

A row is a block of codes. On a GPU, no state exists in fp32 outside the pass over memory. Elsewhere, torch steps short
ranges operator by operator.
"""

from typing import Any, Dict, Optional, Tuple

import torch

from ...zero_1_and_2.step.rule import Partition
from . import adam
from .adam import EAGER_NUMEL, AdamStep, kernel_for, new_state
from .adam_operators import Settings, step_rows
from .blockwise import SIGNED, has_moments, map_of, names_of, to_blocks, zeros
from .dynamic_map import BLOCK
from .own_ranges import keep_state

THIRD_STATE = "has no form for the third state of amsgrad=true; set amsgrad to false"


def problem_with(optimizer: torch.optim.Optimizer) -> Optional[str]:
    """Returns why an optimizer cannot have 8-bit states, with a remedy, or None if it can."""
    if any(group.get("amsgrad") for group in optimizer.param_groups) and adam.is_adam(optimizer):
        return THIRD_STATE
    return adam.problem_with(optimizer)


class EightBitAdam:
    """The rule for all partitions of an engine. It makes every step, also the first."""

    def begin(self, partition: Partition) -> Optional["EightBitStep"]:
        if not partition.step_is_unpatched or partition.master.dtype != torch.float32:
            return None
        if problem_with(partition.optimizer) is not None:
            return None
        if partition.state and not has_moments(partition.state):
            return None
        return EightBitStep(partition, step_rows, kernel_for(partition.master))


class EightBitStep(AdamStep):
    """One step of one partition."""

    columns = BLOCK
    has_scales = True
    numel_on_host = EAGER_NUMEL

    def begin(self) -> Dict[str, Any]:
        """Makes the states in the first step, and converts loaded states to 8 bits."""
        partition, master = self.partition, self.partition.master
        state = partition.state
        if state:
            to_blocks(state, master)
        else:
            state = {**new_state(partition), **zeros(master)}
        keep_state(partition, state)
        return state

    def make_settings(self, scalars: torch.Tensor) -> Settings:
        return Settings(scalars, tuple(map_of(state, self.master) for state in SIGNED))

    def states(self, state: Dict[str, Any], first: int, last: int) -> Tuple[Tuple[torch.Tensor, ...], ...]:
        """Returns codes and scales of the elements' blocks."""
        blocks = slice(first // BLOCK, last // BLOCK)
        codes, scales = zip(*map(names_of, SIGNED), strict=True)
        return tuple(state[name][blocks] for name in codes), tuple(state[name][blocks] for name in scales)
