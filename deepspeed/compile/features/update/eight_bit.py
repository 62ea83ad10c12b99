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
from .adam import EAGER_NUMEL, AdamStep, StepRows, kernel, new_state
from .adam_operators import Elements, Settings, step_rows
from .blockwise import SIGNED, has_moments, map_of, names_of, to_blocks, zeros
from .dynamic_map import BLOCK

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
        return EightBitStep(partition, kernel() if partition.master.is_cuda else step_rows)


class EightBitStep(AdamStep):
    """One step of one partition."""

    columns = BLOCK
    numel_on_host = EAGER_NUMEL

    def __init__(self, partition: Partition, step_rows: StepRows):
        super().__init__(partition, step_rows)
        self.lead = partition.offset % BLOCK
        self._cut: Dict[int, _CutBlock] = {}

    def begin(self) -> Dict[str, Any]:
        """Makes the states in the first step, and converts loaded states to 8 bits."""
        partition, master = self.partition, self.partition.master
        state = partition.state
        if state:
            to_blocks(state, partition.offset, master)
        else:
            state = {**new_state(partition), **zeros(partition.offset, master)}
        partition.keep_state(state)
        return state

    def make_settings(self, scalars: torch.Tensor) -> Settings:
        return Settings(scalars, tuple(map_of(state, self.master) for state in SIGNED))

    def states(self, state: Dict[str, Any], first: int, last: int) -> Tuple[Tuple[torch.Tensor, ...], ...]:
        """Returns codes and scales of the blocks that the elements touch."""
        blocks = slice((self.lead + first) // BLOCK, -(-(self.lead + last) // BLOCK))
        codes, scales = zip(*map(names_of, SIGNED), strict=True)
        return tuple(state[name][blocks] for name in codes), tuple(state[name][blocks] for name in scales)

    def step_part(self, gradient: torch.Tensor, first: int, last: int) -> None:
        """Steps some elements of a block. The block's scale depends on elements that other calls step.

        The pass steps a copy of the block, so that each element has the same bits as in a block that is not cut. Codes
        and scale are written by the pass that has the gradients of all the block's elements in the partition.
        """
        block = (self.lead + first) // BLOCK
        begin = block * BLOCK - self.lead
        if block not in self._cut:
            there = slice(max(begin, 0), begin + BLOCK)
            self._cut[block] = _CutBlock(self.master[there], self.new[there], max(-begin, 0))
        cut, part = self._cut[block], slice(first - begin, last - begin)
        cut.take(part, gradient)
        master, new = cut.master.clone(), cut.new.clone()
        states = self.states(self._state, first, last)
        if cut.missing == 0:
            del self._cut[block]
        else:
            states = tuple(tuple(tensor.clone() for tensor in tensors) for tensors in states)
        self.step_rows(Elements(cut.gradient, master, new, *states), self.settings)
        self.master[first:last] = master[0, part]
        self.new[first:last] = new[0, part]


class _CutBlock:
    """The values from before the step of a block that several calls step. All tensors are [1, BLOCK].

    Args:
        master: the master weights, or their remainders, of the block's elements in the partition.
        parameters: the parameters of these elements.
        before: the number of the block's elements that lie before the partition.
    """

    def __init__(self, master: torch.Tensor, parameters: torch.Tensor, before: int):
        self.missing = master.numel()  # elements whose gradient is not known yet
        self.master, self.new = (self._block(part, before) for part in (master, parameters))
        self.gradient = master.new_empty(0)

    def _block(self, part, before):
        block = part.new_zeros(1, BLOCK)
        block[0, before : before + part.numel()] = part
        return block

    def take(self, part: slice, gradient: torch.Tensor) -> None:
        """Takes the gradient of some elements."""
        if not self.gradient.numel():
            self.gradient = torch.zeros_like(self.master, dtype=gradient.dtype)
        self.gradient[0, part] = gradient
        self.missing -= gradient.numel()
