# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What is refused, and warned of, of DeepSpeed's own options and of the arguments of ``engine.compile()``."""

from typing import Iterator

from ...zero_1_and_2.feature import Feature, Request
from .ignored import ignored
from .refused import refused


class UnsupportedOptions(Feature):
    """Only refuses and warns. Other parts refuse what they themselves cannot do."""

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        return refused(request)

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        return ignored(request)

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return False


FEATURE = UnsupportedOptions
