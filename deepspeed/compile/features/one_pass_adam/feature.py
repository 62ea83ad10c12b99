# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The rule for Adam and AdamW."""

from typing import List

from ...zero_1_and_2.feature import Feature, Request
from ...zero_1_and_2.step.rule import Rule
from .adam import OnePassAdam


class StepsInOnePass(Feature):
    """Asks the rule for Adam before others, which take several passes over memory."""

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return request.backend == "inductor" and request.compiles

    def rules(self, others: List[Rule]) -> List[Rule]:
        return [OnePassAdam(), *others]


FEATURE = StepsInOnePass
