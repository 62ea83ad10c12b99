# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps this rank's partitions of all parameter groups."""

import contextlib
from typing import Any, Dict, Iterator, List, Optional

import torch

from deepspeed.runtime.zero.stage_1_and_2 import (
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_STEP_TIMER,
    DeepSpeedZeroOptimizer,
)

from .scaling import take_scaled


class StepOfGroups:
    """One step of this rank's partitions of all parameter groups. Nothing is changed before :meth:`run`.

    The optimizer steps each partition whole. An optional part may have a subclass that steps partitions otherwise.

    ``factors``: for each parameter group an fp32 tensor [1] with which to multiply gradients, or None for 1.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, factors: List[Optional[torch.Tensor]]):
        self.optimizer, self.factors = optimizer, factors

    def run(self) -> None:
        """Steps the master weights of all groups, and writes them into this rank's partition of the parameters."""
        for group in range(len(self.factors)):
            self.step_group(group)
        note_step(self.optimizer.optimizer)

    def step_group(self, group: int) -> None:
        """Has the optimizer step the master weights of a group at once, and writes them into this rank's partition."""
        optimizer = self.optimizer
        master = optimizer.single_partition_of_fp32_groups[group]
        with timed(optimizer, OPTIMIZER_GRADIENTS_TIMER):
            views = optimizer._deepcompile.backward.take_views(group)
            master.grad = take_scaled(views, self.factors[group], master.data)
        try:
            # _optimizer_step() hides the other groups, and leaves them hidden if it raises. A checkpoint that is
            # loaded then needs all groups.
            with (
                timed(optimizer, OPTIMIZER_STEP_TIMER),
                with_groups(optimizer.optimizer, optimizer.optimizer.param_groups),
            ):
                optimizer._optimizer_step(group)
        finally:
            master.grad = None
        placement = optimizer._deepcompile.placement
        placement.new_parameters(optimizer, group).copy_(master.data)
        placement.send(optimizer, group, 0, master.numel())


@contextlib.contextmanager
def timed(optimizer: DeepSpeedZeroOptimizer, name: str) -> Iterator[None]:
    """Context whose time DeepSpeed's timer of this name counts (``wall_clock_breakdown``)."""
    optimizer.timers(name).start()
    try:
        yield
    finally:
        optimizer.timers(name).stop()


@contextlib.contextmanager
def with_groups(inner: torch.optim.Optimizer, param_groups: List[Dict[str, Any]]) -> Iterator[None]:
    """Context in which an optimizer has these parameter groups. Whatever it has at the end, its own come back."""
    before = inner.param_groups
    try:
        inner.param_groups = param_groups
        yield
    finally:
        inner.param_groups = before


def note_step(inner: torch.optim.Optimizer) -> None:
    """Notes what ``step()`` notes if a scheduler of torch has wrapped it: the scheduler warns if this is missing."""
    if "step" in vars(inner):
        inner._opt_called = True  # type: ignore[attr-defined]
