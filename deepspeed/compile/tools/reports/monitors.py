# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Reports the memory of gradients to DeepSpeed's monitors."""

from typing import TYPE_CHECKING, Iterator

from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.engine.state import state_of
from ...zero_1_and_2.feature import Request
from ...zero_1_and_2.parameter.carrier import mapped_memory

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# Counters that are not written: current bytes, which are zero between two steps, and "registered", which never
# changes.
_LEFT_OUT = {"bound", "on_host", "pending", "unreduced", "bucket", "registered"}


def without_effect(request: Request) -> Iterator[str]:
    """Yields a sentence if the engine should write counters, and will not."""
    if not request.options.monitor_memory:
        return
    if not request.engine.monitor.enabled:
        yield (
            "compile.monitor_memory=True has no effect without a monitor; enable tensorboard, csv_monitor, wandb "
            "or comet"
        )
    elif not request.engine.steps_per_print():
        yield "compile.monitor_memory=True has no effect without steps_per_print; set steps_per_print"


def write_counters(engine: "DeepSpeedEngine") -> None:
    """Called after each step. Every ``steps_per_print`` steps, rank 0 writes its own values.

    Each report restarts the reducer's counters and torch's peaks on every rank, so peaks, in bytes, and numbers count
    from the previous report. Values of other ranks would need a collective. DeepSpeed's own values are rank 0's too.
    """
    if engine.global_steps % engine.steps_per_print():
        return
    reducer = state_of(engine).reducer
    values = {f"gradients/{name}": value for name, value in reducer.counters().items() if name not in _LEFT_OUT}
    reducer.reset_counters()
    accelerator = get_accelerator()
    # On a CPU, DeepSpeed's accelerator reports the memory of the whole process, and no peak.
    if accelerator.device_name() != "cpu":
        # What is mapped stays from set-up to end.
        values["memory/peak_allocated"] = accelerator.max_memory_allocated() + mapped_memory.nbytes
        values["memory/peak_reserved"] = accelerator.max_memory_reserved() + mapped_memory.nbytes
        accelerator.reset_peak_memory_stats()
    # Like DeepSpeed's own values: the name begins with "Train/Samples/", and the step is the number of samples.
    engine.monitor.write_events(
        [(f"Train/Samples/{name}", value, engine.global_samples) for name, value in values.items()]
    )
