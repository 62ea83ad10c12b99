# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps this rank's partitions of all parameter groups, each by the first rule that serves it."""

import functools
from typing import TYPE_CHECKING, Dict, List, Optional, Protocol, Tuple, runtime_checkable

import torch

from deepspeed.runtime.zero.stage_1_and_2 import OPTIMIZER_STEP_TIMER

from ...zero_1_and_2.gradient.layout import partition_offset
from ...zero_1_and_2.step.partitions import StepOfGroups, timed
from .authors import is_replaced, steps_as_written
from .partition_gradient import PartitionGradient
from .ranges import Ranges
from .rule import Partition, Rule, first_step

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


@runtime_checkable
class SendsFirst(Protocol):
    """A gather that can send some parameters before all are stepped."""

    def first_spans(self, group: int) -> List[Tuple[int, int]]:
        """Returns where these parameters lie in this rank's partition of a group: [first, last) in elements."""

    def start_first(self) -> None:
        """Called when these parameters have their new values, on every rank."""


class StepInRanges(StepOfGroups):
    """One step of all parameter groups, range by range where a rule serves a partition, otherwise whole.

    Args:
        rules: in the order in which they are asked.
    """

    def __init__(self, optimizer: "DeepSpeedZeroOptimizer", factors: List[Optional[torch.Tensor]], rules: List[Rule]):
        super().__init__(optimizer, factors)
        # What others have added to a step, only the whole step of the optimizer does.
        as_written = (
            not optimizer.torch_autocast_gradscaler
            and not is_replaced(optimizer._optimizer_step)
            and steps_as_written(optimizer.optimizer)
        )
        groups = range(len(optimizer.bit16_groups))
        self._steps = [first_step(rules, self._partition(group, as_written)) for group in groups]
        # Those of partitions that a rule serves.
        self._ranges: Dict[int, Ranges] = {}

    def _partition(self, group, as_written):
        optimizer = self.optimizer
        return Partition(
            optimizer.optimizer,
            group,
            partition_offset(optimizer, group),
            self.factors[group],
            optimizer.gradient_accumulation_dtype,
            optimizer._deepcompile.placement.new_parameters(optimizer, group),
            as_written and len(optimizer.optimizer.param_groups[group]["params"]) == 1,
        )

    def run(self) -> None:
        optimizer = self.optimizer
        deepcompile = optimizer._deepcompile
        gather, placement = deepcompile.gather, deepcompile.placement
        for group, step in enumerate(self._steps):
            if step is not None:
                master = optimizer.single_partition_of_fp32_groups[group].data
                views = deepcompile.backward.take_views(group)
                gradient = PartitionGradient(views, self.factors[group], master, optimizer.gradient_accumulation_dtype)
                written = functools.partial(placement.send, optimizer, group)
                self._ranges[group] = Ranges(step, master.numel(), gradient, written)
        # From the host, new values are still on their way to the device when they are written.
        all_in_ranges = len(self._ranges) == len(self._steps)
        if all_in_ranges and not placement.on_host and isinstance(gather, SendsFirst):
            with timed(optimizer, OPTIMIZER_STEP_TIMER):
                for group in self._ranges:
                    self._ranges[group].step_first(gather.first_spans(group))
            gather.start_first()
        super().run()

    def step_group(self, group: int) -> None:
        if group not in self._ranges:
            super().step_group(group)
            return
        with timed(self.optimizer, OPTIMIZER_STEP_TIMER):
            # Drop the ranges of a group when it is stepped, because they hold memory for gradients.
            self._ranges.pop(group).step_rest()
