# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an engine reports while it trains: what is being compiled, the time that it took, and counters.

At DeepSpeed's default level, rank 0 logs a line when the first compilation begins, and one after the first step that
compiled. At level INFO it also logs one line for each compiled frame. A backward that is compiled only when it first
runs has no line of its own. Its time is a part of the sum after the step.
"""

import collections
import time
from typing import TYPE_CHECKING, Callable, Iterator

import torch
from torch._dynamo.utils import calculate_time_spent

from deepspeed.accelerator import get_accelerator

from ...features.blocks.feature import Blocks, chosen_blocks
from ...zero_1_and_2.engine.state import state_of
from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.messages import log_info, log_notice
from ...zero_1_and_2.parameter.carrier import mapped_memory
from .tested_torch import untried

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ...zero_1_and_2.graph.backend import Frame

# Counters that are not written: current bytes, which are zero between two steps, and "registered", which never
# changes.
_LEFT_OUT = {"bound", "on_host", "pending", "unreduced", "bucket", "registered"}


class Reports(Feature):
    """Logs an engine's compilations, and writes its counters to DeepSpeed's monitors."""

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        yield from untried(torch.__version__, get_accelerator().device_name())
        yield from _without_effect(request)

    def __init__(self, context: SetUpContext):
        request = context.request
        self._monitors = request.options.monitor_memory and not any(_without_effect(request))
        model = type(context.engine.module).__name__
        blocks = context.get(Blocks).blocks
        self._layers = collections.Counter(type(block).__name__ for block in blocks)
        self._rest = f"{model} around its blocks" if blocks else model
        named_classes = " and ".join(f"{number} blocks of class {name}" for name, number in self._layers.items())
        self._what = named_classes or f"{model} as a whole, because {chosen_blocks(request)[1]}"
        self._compiles = request.compiles
        # Frames compiled before the line after the step, and the seconds of compilations before them.
        self._frames, self._seconds_before = 0, 0.0
        self._logged_begin = self._logged_none = self._logged_end = False

    def after_step(self, engine: "DeepSpeedEngine") -> None:
        self._log_after_step()
        if self._monitors:
            write_counters(engine)

    def _log_after_step(self):
        """Logs a line after the first step that compiled, or if the first step compiled nothing."""
        if self._logged_end:
            return
        if self._frames:
            took = _seconds_of_compilations() - self._seconds_before
            log_notice(f"DeepCompile has compiled {self._what}; compiling took {took:.1f} s")
            self._logged_end = True
        elif not self._logged_none:
            off = "torch.compile is switched off by compile_kwargs['disable'] or TORCH_COMPILE_DISABLE"
            why = "the step ran no code of the model that is compiled" if self._compiles else off
            log_notice(f"DeepCompile has compiled nothing in the first step, because {why}")
            self._logged_none = True

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        if not self._logged_begin:
            log_notice(f"DeepCompile is compiling {self._what}; the first step takes longer than later ones")
            self._logged_begin = True
            # Torch adds the time of a frame, including tracing, when the frame's compilation ends.
            self._seconds_before = _seconds_of_compilations()
        began = time.perf_counter()
        run = compiled()
        log_info(self._line_of(frame, time.perf_counter() - began))
        self._frames += 1
        return run

    def _line_of(self, frame, seconds):
        layers = "" if frame.layer is None else f"for {self._layers[frame.layer]} layers, "
        graph = "no gradients" if frame.graph_id is None else f"graph {frame.graph_id}"
        return f"DeepCompile compiled {frame.layer or self._rest} in {seconds:.1f} s ({layers}{graph})"


def _seconds_of_compilations():
    """Returns the seconds in which this process has compiled frames, and backwards at their first run."""
    return calculate_time_spent()["total_wall_time"]


FEATURE = Reports


def _without_effect(request):
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
