# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Tells the user what is being compiled, and how long that took.

Rank 0 logs one line for each forward and each backward that was compiled, at level INFO. If standard error is a
terminal, a bar shows there what is being compiled at the moment. Neither appears if the level of DeepSpeed's logger is
above INFO.

Dynamo says when it begins and ends to compile, also where it compiles a backward only when the backward first runs.
Dynamo does not say what it compiles: the backend says so in between, by :meth:`Progress.compiles`.
"""

import collections
import logging
import sys
import time
from typing import Dict, List, NamedTuple, Optional

import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from tqdm import tqdm

import deepspeed.comm as dist
from deepspeed.utils import logger

FORWARD, BACKWARD = "forward", "backward"


class Progress:
    """Names what is compiled for one engine, and counts the graphs of its blocks.

    Args:
        model: the name of the model's class.
        blocks: the names of the blocks' classes, one name for each block. Empty if the model is compiled as a whole.
    """

    def __init__(self, model: str, blocks: List[str]):
        self._layers = collections.Counter(blocks)
        self._rest = f"{model} around its blocks" if blocks else model
        # Classes of blocks in the order in which they are compiled, and the graphs of blocks that have been compiled.
        self._classes: Dict[str, int] = {}
        self._done = set()
        self._seconds = 0.0
        self._bar: Optional[tqdm] = None

    def compiles(self, block: Optional[str], graph_id: Optional[int]) -> None:
        """Called when Dynamo has traced a frame, before the frame's graph is compiled.

        Args:
            block: the name of the block's class, or None outside of blocks.
            graph_id: the graph id, or None if the frame reduces nothing.
        """
        if dist.get_rank() != 0 or not logger.isEnabledFor(logging.INFO):
            return
        details = ["no gradients" if graph_id is None else f"graph {graph_id}"]
        if block is not None:
            number = self._classes.setdefault(block, 1 + len(self._classes))
            details.insert(0, f"block class {number} of {len(self._layers)}, for {self._layers[block]} layers")
        name = self._rest if block is None else block
        _watch.compiles(_Graph(self, name, ", ".join(details)), has_backward=graph_id is not None)

    def begin(self, graph: "_Graph", direction: str) -> None:
        """Shows on a terminal what is being compiled from now on."""
        if not sys.stderr.isatty():
            return
        what = f"DeepCompile compiles the {direction} of {graph.name}"
        total, shape = None, "{desc} (%.1f s so far)" % self._seconds
        if self._layers:
            total, shape = 2 * len(self._layers), shape + " |{bar:12}| {n_fmt} of {total_fmt} graphs of blocks"
        # A bar that stayed would stand between the lines of the caller's own bars.
        self._bar = tqdm(desc=what, total=total, initial=len(self._done), bar_format=shape, leave=False)

    def end(self, graph: "_Graph", direction: str, seconds: Optional[float]) -> None:
        """Takes the bar away and logs how many seconds compiling took, or nothing for None, if compiling failed."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if seconds is None:
            return
        self._seconds += seconds
        if graph.name in self._layers:
            self._done.add((graph.name, direction))
        # Takes the caller's own bars off the terminal while the line is written.
        with tqdm.external_write_mode(file=sys.stdout):
            logger.info(f"DeepCompile compiled the {direction} of {graph.name} in {seconds:.1f} s ({graph.details})")


class _Graph(NamedTuple):
    progress: Progress
    name: str
    details: str


class _Watch:
    """Takes the time of each compilation. Dynamo tells this object of all compilations of the process."""

    def __init__(self):
        self._graph: Optional[_Graph] = None
        self._direction = FORWARD
        self._began = 0.0
        # The exception that the program was handling when the compilation began.
        self._handled: Optional[BaseException] = None
        # Dynamo's name of a compilation -> the graph whose backward has not been compiled by itself.
        self._without_backward: Dict[str, _Graph] = {}

    def compiles(self, graph: _Graph, has_backward: bool) -> None:
        if self.on_start not in callback_handler.start_callbacks:
            # This is the first compilation of all, or torch._dynamo.reset() has dropped all callbacks. Nobody said
            # when this compilation began: count from here.
            callback_handler.register_start_callback(self.on_start)
            callback_handler.register_end_callback(self.on_end)
            self._begins()
        if has_backward:
            self._without_backward[str(torch._guards.CompileContext.current_compile_id())] = graph
        self._shows(graph, FORWARD)

    def on_start(self, args: CallbackArgs) -> None:
        self._begins()
        if args.callback_trigger is CallbackTrigger.LAZY_BACKWARD:
            graph = self._without_backward.pop(args.compile_id, None)
            if graph is not None:
                self._shows(graph, BACKWARD)

    def on_end(self, args: CallbackArgs) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            # Dynamo calls this function also if an exception ends the compilation.
            failed = sys.exc_info()[1] is not self._handled
            graph.progress.end(graph, self._direction, None if failed else time.perf_counter() - self._began)

    def _begins(self):
        self._graph, self._handled, self._began = None, sys.exc_info()[1], time.perf_counter()

    def _shows(self, graph, direction):
        self._graph, self._direction = graph, direction
        graph.progress.begin(graph, direction)


_watch = _Watch()
