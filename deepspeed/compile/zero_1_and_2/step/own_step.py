# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps a partition at once by the optimizer's own ``step()``."""

import contextlib
from typing import Any, Dict, Iterator, List

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .partition_gradient import PartitionGradient
from .rule import Step


class WholeStep(Step):
    """One ``Step`` of one partition as one range, by the optimizer itself, for a partition that no rule serves.

    Its optimizer reads more than one element at a time, or somebody has replaced ``step()``.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, group: int):
        self._optimizer, self._group = optimizer, group

    def run(self, gradient: PartitionGradient, first: int, limit: int) -> int:
        optimizer, inner = self._optimizer, self._optimizer.optimizer
        master = optimizer.single_partition_of_fp32_groups[self._group]
        master.grad = gradient.scaled(first, limit)
        # Keep no reference to the gradient, which the optimizer may drop.
        gradient.drop()
        try:
            # The base's method leaves only this group in `param_groups` if the step raises: put all groups back.
            with with_groups(inner, inner.param_groups):
                optimizer._optimizer_step(self._group)
        finally:
            master.grad = None
        optimizer._deepcompile.placement.new_parameters(optimizer, self._group).write(0, master.data)
        return limit


@contextlib.contextmanager
def with_groups(inner: torch.optim.Optimizer, param_groups: List[Dict[str, Any]]) -> Iterator[None]:
    """Context in which an optimizer has these parameter groups. Its own groups come back at the end."""
    before = inner.param_groups
    try:
        inner.param_groups = param_groups
        yield
    finally:
        inner.param_groups = before
