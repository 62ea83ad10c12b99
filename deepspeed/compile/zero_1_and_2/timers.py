# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's timers get to know."""

import contextlib
from typing import TYPE_CHECKING, Iterator

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


@contextlib.contextmanager
def timed(optimizer: "DeepSpeedZeroOptimizer", name: str) -> Iterator[None]:
    """Context whose time DeepSpeed's timer of this name counts (``wall_clock_breakdown``)."""
    optimizer.timers(name).start()
    try:
        yield
    finally:
        optimizer.timers(name).stop()
