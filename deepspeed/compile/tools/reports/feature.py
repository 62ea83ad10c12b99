# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an engine reports while it trains."""

from typing import TYPE_CHECKING, Callable, Iterator

import torch

from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from .monitors import without_effect, write_counters
from .progress import Progress
from .tested_torch import untried

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ...zero_1_and_2.graph.backend import Frame


class Reports(Feature):
    """Logs an engine's compilations, and writes its counters to DeepSpeed's monitors."""

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        yield from untried(torch.__version__, get_accelerator().device_name())
        yield from without_effect(request)

    def __init__(self, context: SetUpContext):
        self._progress = Progress(context)
        request = context.request
        self._monitors = request.options.monitor_memory and not any(without_effect(request))

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        return self._progress.around_compile(frame, compiled)

    def after_step(self, engine: "DeepSpeedEngine") -> None:
        self._progress.after_step()
        if self._monitors:
            write_counters(engine)


FEATURE = Reports
