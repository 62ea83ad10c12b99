# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's monitors and timers get to know."""

import contextlib
from typing import TYPE_CHECKING, Iterator

from deepspeed.accelerator import get_accelerator

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from .native import Reducer

# The counters of a reducer that are bytes of gradients at the moment. "bucket" is memory in which some of them lie.
HELD = ("bound", "on_host", "pending", "unreduced")
# Counters that are not written: the bytes held now, which are zero between two steps, and "registered", which never
# changes.
_LEFT_OUT = {*HELD, "bucket", "registered"}


def write_memory(engine: "DeepSpeedEngine", reducer: "Reducer") -> None:
    """Writes counters and peaks of memory to DeepSpeed's monitors (``compile.monitor_memory``).

    Called on every rank after an optimizer step. Every ``steps_per_print`` steps, rank 0 writes its own values.

    Each report restarts the reducer's counters and torch's peaks on every rank, so peaks, in bytes, and numbers count
    from the previous report. Values of other ranks would need a collective. DeepSpeed's own values are rank 0's too.
    """
    if engine.global_steps % engine.steps_per_print():
        return
    values = {f"gradients/{name}": value for name, value in reducer.counters().items() if name not in _LEFT_OUT}
    reducer.reset_counters()
    accelerator = get_accelerator()
    # On a CPU, DeepSpeed's accelerator gives the memory of the whole process, and no peak of it.
    if accelerator.device_name() != "cpu":
        values["memory/peak_allocated"] = accelerator.max_memory_allocated()
        values["memory/peak_reserved"] = accelerator.max_memory_reserved()
        accelerator.reset_peak_memory_stats()
    # Like DeepSpeed's own values: the name begins with "Train/Samples/", and the step is the number of samples.
    engine.monitor.write_events(
        [(f"Train/Samples/{name}", value, engine.global_samples) for name, value in values.items()]
    )


@contextlib.contextmanager
def timed(optimizer: "DeepSpeedZeroOptimizer", name: str) -> Iterator[None]:
    """Context whose time DeepSpeed's timer of this name counts (``wall_clock_breakdown``)."""
    optimizer.timers(name).start()
    try:
        yield
    finally:
        optimizer.timers(name).stop()
