# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Logs what is being compiled, and the time that it took.

At DeepSpeed's default level, rank 0 logs a line when the first compilation begins, and one after the first step that
compiled. At level INFO it logs one line for each compiled frame, and if standard error is a terminal, a bar shows the
current compilation. A backward that is compiled only when it first runs has no line of its own. Its time is a part of
the sum after the step.
"""

import collections
import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Callable, Dict

from torch._dynamo.utils import calculate_time_spent
from tqdm import tqdm

import deepspeed.comm as dist
from deepspeed.utils import logger

from ...features.blocks.feature import Blocks, chosen_blocks
from ...zero_1_and_2.feature import SetUpContext
from ...zero_1_and_2.messages import log_notice

if TYPE_CHECKING:
    from ...zero_1_and_2.graph.backend import Frame


class Progress:
    """Logs the compilations of one engine."""

    def __init__(self, context: SetUpContext):
        model = type(context.engine.module).__name__
        blocks = context.get(Blocks).blocks
        self._layers = collections.Counter(type(block).__name__ for block in blocks)
        self._rest = f"{model} around its blocks" if blocks else model
        # Classes of blocks -> their numbers, in the order in which they are compiled.
        self._classes: Dict[str, int] = {}
        named_classes = " and ".join(f"{number} blocks of class {name}" for name, number in self._layers.items())
        self._what = named_classes or f"{model} as a whole, because {chosen_blocks(context.request)[1]}"
        self._compiles = context.request.compiles
        # Frames compiled before the line after the step, and the seconds of compilations before them.
        self._frames, self._seconds_before = 0, 0.0
        self._told_of_begin = self._told_of_none = self._told = False

    def after_step(self) -> None:
        """Logs a line after the first step that compiled, or if the first step compiled nothing."""
        if self._told:
            return
        if self._frames:
            took = _seconds_of_compilations() - self._seconds_before
            _tell(f"DeepCompile has compiled {self._what}; compiling took {took:.1f} s")
            self._told = True
        elif not self._told_of_none:
            off = "torch.compile is switched off by compile_kwargs['disable'] or TORCH_COMPILE_DISABLE"
            why = "the step ran no code of the model that is compiled" if self._compiles else off
            _tell(f"DeepCompile has compiled nothing in the first step, because {why}")
            self._told_of_none = True

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        """Compiles a frame, and returns what runs its graph, as ``Feature.around_compile()`` does."""
        if not self._told_of_begin:
            _tell(f"DeepCompile is compiling {self._what}; the first step takes longer than later ones")
            self._told_of_begin = True
            # Torch adds the time of a frame, including tracing, when the frame's compilation ends.
            self._seconds_before = _seconds_of_compilations()
        with self._shown(frame):
            run = compiled()
        self._frames += 1
        return run

    @contextlib.contextmanager
    def _shown(self, frame):
        """Context of a compilation that is shown at level INFO."""
        if dist.get_rank() != 0 or not logger.isEnabledFor(logging.INFO):
            yield
            return
        block = frame.layer
        name, details = block or self._rest, "no gradients" if frame.graph_id is None else f"graph {frame.graph_id}"
        if block is not None:
            number = self._classes.setdefault(block, 1 + len(self._classes))
            details = f"block class {number} of {len(self._layers)}, for {self._layers[block]} layers, {details}"
        began = time.perf_counter()
        shape = "{desc}" + (" |{bar:12}| {n_fmt} of {total_fmt} classes of blocks" if self._layers else "")
        # Remove the bar at its end: it would stand between the lines of the caller's own bars.
        with tqdm(
            desc=f"DeepCompile compiles {name}",
            total=len(self._layers) or None,
            initial=len(self._classes),
            bar_format=shape,
            leave=False,
            disable=not sys.stderr.isatty(),
        ):
            yield
        with _without_bars():
            logger.info(f"DeepCompile compiled {name} in {time.perf_counter() - began:.1f} s ({details})")


def _seconds_of_compilations():
    """Returns the seconds in which this process has compiled frames, and backwards at their first run."""
    return calculate_time_spent()["total_wall_time"]


def _without_bars():
    """Context in which a line is written: takes the caller's own bars off the terminal meanwhile."""
    return tqdm.external_write_mode(file=sys.stdout)


def _tell(line):
    with _without_bars():
        log_notice(line)
