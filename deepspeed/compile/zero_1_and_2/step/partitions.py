# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps this rank's partitions of all parameter groups, each by the first rule that serves it, range by range.

The fp32 gradients of a partition need twice the memory of its bf16 gradients, and the temporaries of an optimizer may
need as much again. If the optimizer treats each element by itself, the fp32 gradients and the temporaries need to
exist only for one range at a time.
"""

import contextlib
import functools
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from deepspeed.runtime.zero.stage_1_and_2 import OPTIMIZER_STEP_TIMER, DeepSpeedZeroOptimizer

from .authors import runs_unpatched_step
from .partition_gradient import PartitionGradient
from .rule import Partition, Step, first_step

# A partition of fewer elements is stepped as a whole: to step some spans first would take longer.
SMALL_NUMEL = 2**24


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


class Ranges:
    """Steps a partition range by range.

    Args:
        written: a function to call with (first, last) when the new values of the elements [first, last) are written.
    """

    def __init__(self, step: Step, numel: int, gradient: PartitionGradient, written: Callable[[int, int], None]):
        self._step, self._numel, self._gradient, self._written = step, numel, gradient, written
        self._spans = [(0, numel)]  # elements that are not stepped yet

    def step_first(self, spans: List[Tuple[int, int]]) -> None:
        """Steps the elements in ``spans``, [first, last) in ascending order, before all others.

        A span must not cut a gradient. If the partition is small, this steps all elements.
        """
        if spans and self._numel < SMALL_NUMEL:
            spans = [(0, self._numel)]
        self._run(spans)
        borders = [border for span in spans for border in span]
        self._spans = [*zip([0, *borders[1::2]], [*borders[::2], self._numel], strict=True)]
        # Other partitions are stepped before the rest of this one.
        self._gradient.give_memory_back()

    def step_rest(self) -> None:
        """Steps all other elements, and the states that belong to no element, such as counts of steps."""
        self._run(self._spans)
        self._step.finish()

    def _run(self, spans):
        for first, end in spans:
            while first < end:
                last = self._step.run(self._gradient, first, end)
                if not first < last <= end:
                    raise RuntimeError(
                        f"{type(self._step).__name__}.run() was to step elements from {first} to {end} at most and "
                        f"returned {last}; a rule must return the end of the elements that it has stepped"
                    )
                self._written(first, last)
                first = last


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
