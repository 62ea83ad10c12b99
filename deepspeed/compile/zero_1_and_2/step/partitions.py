# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps this rank's partitions of all parameter groups, each by the first rule that serves it, range by range."""

import contextlib
import functools
from typing import Iterator, List, Optional

import torch

from deepspeed.runtime.zero.stage_1_and_2 import OPTIMIZER_STEP_TIMER, DeepSpeedZeroOptimizer

from .authors import runs_unpatched_step
from .own_step import WholeStep
from .partition_gradient import PartitionGradient
from .ranges import Ranges
from .rule import Partition, first_step


class StepOfGroups:
    """One step of this rank's partitions of all parameter groups. Nothing is changed before :meth:`run`.

    A partition that no rule serves is one range, which the optimizer steps.

    ``factors``: for each parameter group an fp32 tensor [1] with which to multiply gradients, or None for 1.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, factors: List[Optional[torch.Tensor]]):
        self.optimizer, self.factors = optimizer, factors
        # Only the optimizer's own step() runs code that others have added to it.
        step_is_unpatched = not optimizer.torch_autocast_gradscaler and runs_unpatched_step(optimizer.optimizer)
        rules, groups = optimizer._deepcompile.rules, range(len(factors))
        self._steps = [
            first_step(rules, self._partition(group, step_is_unpatched)) or WholeStep(optimizer, group)
            for group in groups
        ]

    def prepare(self) -> None:
        """Called before the host waits for the device, with the gradients in ``averaged_gradients``."""
        for group, step in enumerate(self._steps):
            step.prepare(self.optimizer.averaged_gradients[group].by_offset())

    def _partition(self, group, step_is_unpatched):
        optimizer = self.optimizer
        return Partition(
            optimizer.optimizer,
            group,
            self.factors[group],
            optimizer.gradient_accumulation_dtype,
            optimizer._deepcompile.placement.new_parameters(optimizer, group),
            step_is_unpatched and len(optimizer.optimizer.param_groups[group]["params"]) == 1,
        )

    def run(self) -> None:
        """Steps the master weights of all groups, and writes them into this rank's partition of the parameters."""
        optimizer, deepcompile = self.optimizer, self.optimizer._deepcompile
        ranges = [self._ranges(group, step) for group, step in enumerate(self._steps)]
        # With the optimizer on the host, new values are still on their way to the device.
        if not deepcompile.placement.on_host and not any(isinstance(step, WholeStep) for step in self._steps):
            with timed(optimizer, OPTIMIZER_STEP_TIMER):
                for group, group_ranges in enumerate(ranges):
                    group_ranges.step_first(deepcompile.gather.first_spans(group))
            deepcompile.gather.start_first()
        # Drop the ranges of each group after its step, because they hold memory for gradients.
        ranges.reverse()
        while ranges:
            with timed(optimizer, OPTIMIZER_STEP_TIMER):
                ranges.pop().step_rest()
        note_step(optimizer.optimizer)

    def _ranges(self, group, step):
        optimizer, deepcompile = self.optimizer, self.optimizer._deepcompile
        master = optimizer.single_partition_of_fp32_groups[group].data
        views = deepcompile.backward.take_views(group)
        gradient = PartitionGradient(views, self.factors[group], master, optimizer.gradient_accumulation_dtype)
        written = functools.partial(deepcompile.placement.send, optimizer, group)
        return Ranges(step, master.numel(), gradient, written)


@contextlib.contextmanager
def timed(optimizer: DeepSpeedZeroOptimizer, name: str) -> Iterator[None]:
    """Context whose time DeepSpeed's timer of this name counts (``wall_clock_breakdown``)."""
    optimizer.timers(name).start()
    try:
        yield
    finally:
        optimizer.timers(name).stop()


def note_step(inner: torch.optim.Optimizer) -> None:
    """Sets the mark of a ``step()`` that a scheduler of torch has wrapped: without it the scheduler warns."""
    if "step" in vars(inner):
        inner._opt_called = True  # type: ignore[attr-defined]
