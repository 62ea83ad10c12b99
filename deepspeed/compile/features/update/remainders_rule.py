# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The rule for partitions whose master weights are remainders."""

from typing import Any, Dict, Optional, Sequence, Union

import torch

from ...zero_1_and_2.step.rule import Partition
from .adam import EAGER_NUMEL, AdamStep, is_fp32, kernel_for, names_of_states, new_state, problem_with
from .adam_operators import step_rows
from .eight_bit import EightBitAdam
from .own_ranges import keep_state


class RemaindersAdam:
    """The rule for all partitions of an engine whose master weights are remainders.

    ``Partition.new`` holds the parameters before the step: the gradients lie elsewhere, because ``offload_optimizer``
    is refused.

    Args:
        remainders: remainders of this rank's partitions, by parameter group, int16 1-D.
        states: the rule that gives the form of the states.
    """

    def __init__(self, remainders: Sequence[torch.Tensor], states: "Union[EveryStepAdam, EightBitAdam]"):
        self._remainders, self._states = remainders, states

    def begin(self, partition: Partition) -> Optional[AdamStep]:
        step = self._states.begin(partition)
        if step is not None:
            step.master = self._remainders[partition.index]
        return step


class EveryStepAdam:
    """The rule for states in fp32. It makes every step, also the first, and the states in it."""

    def begin(self, partition: Partition) -> Optional["EveryStep"]:
        if not partition.step_is_unpatched or problem_with(partition.optimizer) is not None:
            return None
        states = (partition.state.get(name) for name in names_of_states(partition))
        if partition.state and not all(is_fp32(state, partition.master) for state in states):
            return None
        return EveryStep(partition, step_rows, kernel_for(partition.master))


class EveryStep(AdamStep):
    """One step of one partition."""

    numel_on_host = EAGER_NUMEL

    def begin(self) -> Dict[str, Any]:
        """Makes the states in the first step."""
        partition = self.partition
        if not partition.state:
            zeros = {name: torch.zeros_like(partition.master.data) for name in names_of_states(partition)}
            keep_state(partition, {**new_state(partition), **zeros})
        return partition.state
