# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gathers updated parameters while the next forward begins (``compile.overlap_param_gather``)."""

import contextlib
from typing import TYPE_CHECKING, Callable, Iterator, Optional

from ...zero_1_and_2.feature import Asked, Feature, Making
from ..blocks.feature import Blocks, no_blocks
from .gather_hooks import ParameterArrivals

if TYPE_CHECKING:
    from ...zero_1_and_2.graph.frame import Frame


class OverlapGather(Feature):
    """Has the blocks of one engine wait for their parameters."""

    @classmethod
    def is_wanted(cls, asked: Asked) -> bool:
        return asked.options.overlap_param_gather

    @classmethod
    def refusals(cls, asked: Asked) -> Iterator[str]:
        if cls.is_wanted(asked):
            yield from no_blocks(asked, "compile.overlap_param_gather needs blocks that wait for their parameters")

    def __init__(self, making: Making):
        blocks = making.get(Blocks)
        self._waiting = ParameterArrivals(making.optimizer, making.module, blocks.blocks)
        making.undo.callback(self._waiting.remove_hooks)
        self.gather = self._waiting.gather
        blocks.wrap_calls(self._waiting.around_call)

    def graph(self, frame: "Frame") -> Optional[Callable[[], None]]:
        return self._waiting.before_graph(frame.inputs)

    @contextlib.contextmanager
    def around_forward(self, training: bool) -> Iterator[None]:
        # Parameters outside the blocks are complete before the forward starts; all parameters are complete when the
        # forward ends.
        self._waiting.forward_begins(training)
        yield
        self._waiting.leave()


FEATURE = OverlapGather
