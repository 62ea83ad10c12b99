# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps this rank's partitions of all parameter groups, each by the first rule that serves it."""

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional

import torch

from deepspeed.runtime.zero.stage_1_and_2 import OPTIMIZER_GRADIENTS_TIMER, OPTIMIZER_STEP_TIMER

from ..gradient.layout import partition_offset
from ..timers import timed
from .authors import is_replaced, steps_as_written
from .partition_gradient import PartitionGradient
from .ranges import Ranges
from .rule import Partition, first_step

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


class StepOfGroups:
    """One step of this rank's partitions of all parameter groups. Nothing is changed before :meth:`run`.

    Args:
        optimizer: the ZeRO-1/2 optimizer.
        factors: for each parameter group an fp32 tensor [1] with which to multiply gradients, or None for 1.
    """

    def __init__(self, optimizer: "DeepSpeedZeroOptimizer", factors: List[Optional[torch.Tensor]]):
        self._optimizer, self._factors = optimizer, factors
        rules, groups = optimizer._deepcompile.rules, range(len(optimizer.bit16_groups))
        # What others have added to a step, only the whole step of the optimizer does.
        as_written = (
            bool(rules)
            and not optimizer.torch_autocast_gradscaler
            and not is_replaced(optimizer._optimizer_step)
            and steps_as_written(optimizer.optimizer)
        )
        self._steps = [first_step(rules, self._partition(group, as_written)) for group in groups]

    def _partition(self, group, as_written):
        optimizer = self._optimizer
        return Partition(
            optimizer.optimizer,
            group,
            partition_offset(optimizer, group),
            self._factors[group],
            optimizer.gradient_accumulation_dtype,
            optimizer._deepcompile.placement.new_parameters(optimizer, group),
            as_written and len(optimizer.optimizer.param_groups[group]["params"]) == 1,
        )

    def run(self) -> None:
        """Steps the master weights of all groups, and writes them into this rank's partition of the parameters."""
        optimizer = self._optimizer
        gather, placement = optimizer._deepcompile.gather, optimizer._deepcompile.placement
        ranges = {group: self._ranges(group, step) for group, step in enumerate(self._steps) if step is not None}
        # From the host, new values are still on their way to the device when they are written.
        if len(ranges) == len(self._steps) and not placement.on_host:
            with timed(optimizer, OPTIMIZER_STEP_TIMER):
                for group in ranges:
                    ranges[group].step_first(gather.first_spans(group))
            gather.start_first()
        for group in range(len(self._steps)):
            if group in ranges:
                with timed(optimizer, OPTIMIZER_STEP_TIMER):
                    # Drop the ranges of a group when it is stepped, because they hold memory for gradients.
                    ranges.pop(group).step_rest()
            else:
                self._step_whole(group)
        note_step(optimizer.optimizer)

    def _ranges(self, group, step):
        numel = self._optimizer.single_partition_of_fp32_groups[group].numel()
        written = functools.partial(self._optimizer._deepcompile.placement.send, self._optimizer, group)
        return Ranges(step, numel, self._take_gradient(group), written)

    def _take_gradient(self, group):
        """Takes the gradient of a partition out of ``averaged_gradients``."""
        optimizer = self._optimizer
        views, optimizer.averaged_gradients[group] = optimizer.averaged_gradients[group], None
        like = optimizer.single_partition_of_fp32_groups[group].data
        return PartitionGradient(views, self._factors[group], like, optimizer.gradient_accumulation_dtype)

    def _step_whole(self, group):
        """Has the optimizer step the master weights of a group at once, and writes them into this rank's partition."""
        optimizer = self._optimizer
        master = optimizer.single_partition_of_fp32_groups[group]
        with timed(optimizer, OPTIMIZER_GRADIENTS_TIMER):
            master.grad = self._take_gradient(group).scaled(0, master.numel())
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
