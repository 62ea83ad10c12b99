# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The rule by which an optimizer itself steps ranges."""

from typing import List

from ...zero_1_and_2.feature import Feature
from ...zero_1_and_2.step.rule import Rule
from .own_step import OwnRanges


class StepsInRanges(Feature):
    """Has the optimizer step in ranges what no other rule steps."""

    def rules(self, others: List[Rule]) -> List[Rule]:
        return [*others, OwnRanges()]


FEATURE = StepsInRanges
