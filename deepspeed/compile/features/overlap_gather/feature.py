# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gathers updated parameters while the next forward begins (``compile.overlap_param_gather``)."""

import contextlib
from typing import TYPE_CHECKING, Callable, Iterator

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ..blocks.feature import Blocks
from .gather_hooks import ParameterArrivals

if TYPE_CHECKING:
    from ...zero_1_and_2.graph.backend import Frame


class OverlapGather(Feature):
    """Has the blocks of one engine wait for their parameters."""

    needs_blocks = "compile.overlap_param_gather needs blocks that wait for their parameters"

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return request.options.overlap_param_gather

    def __init__(self, context: SetUpContext):
        blocks = context.get(Blocks)
        self._waiting = ParameterArrivals(context.optimizer, context.module, blocks.blocks)
        context.undo.callback(self._waiting.remove_hooks)
        self.gather = self._waiting.gather
        blocks.wrap_calls(self._waiting.around_call)

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        return self._waiting.around_graph(frame.inputs, compiled())

    @contextlib.contextmanager
    def around_forward(self, training: bool) -> Iterator[None]:
        # Parameters outside the blocks are complete before the forward starts; all parameters are complete when the
        # forward ends.
        self._waiting.forward_begins(training)
        yield
        self._waiting.leave()


FEATURE = OverlapGather
