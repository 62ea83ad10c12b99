# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Has rules step the partitions of one engine: those of other parts, and one by which the optimizer itself steps."""

from typing import TYPE_CHECKING, List, Optional

import torch

from ...zero_1_and_2.feature import SetUpContext
from ...zero_1_and_2.step.partitions import StepOfGroups
from .own_step import OwnRanges
from .rule import HasRules, Rule, make_rules
from .step_in_ranges import StepInRanges

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


class StepsInRanges(HasRules):
    """Has the optimizer step in ranges what no other rule steps."""

    def __init__(self, context: SetUpContext):
        # Of all parts, in the order in which they are asked. Made in the first step, because parts that are made later
        # than this one have rules too.
        self.all_rules: Optional[List[Rule]] = None

    def rules(self, others: List[Rule]) -> List[Rule]:
        return [*others, OwnRanges()]

    def step_of_groups(
        self, optimizer: "DeepSpeedZeroOptimizer", factors: List[Optional[torch.Tensor]]
    ) -> StepOfGroups:
        if self.all_rules is None:
            self.all_rules = make_rules(optimizer._deepcompile.features)
        return StepInRanges(optimizer, factors, self.all_rules)


FEATURE = StepsInRanges
