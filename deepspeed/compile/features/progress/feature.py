# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Tells the user what is being compiled, and how long that took.

Rank 0 logs one line for each frame that was compiled, at level INFO. If standard error is a terminal, a bar there
shows what is being compiled at the moment. Neither appears if the level of DeepSpeed's logger is above INFO. A
backward that is compiled only when it first runs has no line.
"""

import collections
import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Dict, Iterator

from tqdm import tqdm

import deepspeed.comm as dist
from deepspeed.utils import logger

from ...zero_1_and_2.feature import Feature, SetUpContext
from ..blocks.feature import Blocks

if TYPE_CHECKING:
    from ...zero_1_and_2.graph.frame import Frame


class Progress(Feature):
    """Names what is compiled for one engine, and counts the classes of its blocks."""

    def __init__(self, context: SetUpContext):
        model = type(context.engine.module).__name__
        blocks = context.get(Blocks).blocks
        self._layers = collections.Counter(type(block).__name__ for block in blocks)
        self._rest = f"{model} around its blocks" if blocks else model
        # Classes of blocks -> their numbers, in the order in which they are compiled.
        self._classes: Dict[str, int] = {}

    @contextlib.contextmanager
    def compiling(self, frame: "Frame") -> Iterator[None]:
        if dist.get_rank() != 0 or not logger.isEnabledFor(logging.INFO):
            yield
            return
        block = frame.block
        name, details = block or self._rest, "no gradients" if frame.graph_id is None else f"graph {frame.graph_id}"
        if block is not None:
            number = self._classes.setdefault(block, 1 + len(self._classes))
            details = f"block class {number} of {len(self._layers)}, for {self._layers[block]} layers, {details}"
        began = time.perf_counter()
        shape = "{desc}" + (" |{bar:12}| {n_fmt} of {total_fmt} classes of blocks" if self._layers else "")
        # A bar that stayed would stand between the lines of the caller's own bars.
        with tqdm(
            desc=f"DeepCompile compiles {name}",
            total=len(self._layers) or None,
            initial=len(self._classes),
            bar_format=shape,
            leave=False,
            disable=not sys.stderr.isatty(),
        ):
            yield
        # Takes the caller's own bars off the terminal while the line is written.
        with tqdm.external_write_mode(file=sys.stdout):
            logger.info(f"DeepCompile compiled {name} in {time.perf_counter() - began:.1f} s ({details})")


FEATURE = Progress
