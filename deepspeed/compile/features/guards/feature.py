# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Guards in an engine: every compilation makes all of them."""

from typing import Callable

from ...zero_1_and_2.feature import Feature
from ...zero_1_and_2.graph.backend import Frame
from .guards import guard_all


class Guards(Feature):
    """Called for each compilation, and does nothing else."""

    def around_compile(self, frame: Frame, compiled: Callable[[], Callable]) -> Callable:
        guard_all()
        return compiled()


FEATURE = Guards
