# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Guards in an engine: every compilation makes all of them."""

from ...zero_1_and_2.feature import Feature
from ...zero_1_and_2.graph.backend import Frame
from .guards import guard_all


class Guards(Feature):
    """Called for each compilation, and does nothing else."""

    def graph(self, frame: Frame) -> None:
        guard_all()


FEATURE = Guards
