# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gives the loss of a language model a graph of its own, or computes it in chunks.

torch's caches need no hash of this source: their keys have each graph that is cut off here.
"""

from typing import TYPE_CHECKING, Callable, Optional

import torch

from ...zero_1_and_2.feature import Feature, SetUpContext
from . import own_graph
from .find_loss import ChunkedLosses

if TYPE_CHECKING:
    from ...zero_1_and_2.graph.frame import Frame


class Loss(Feature):
    """Cuts the graph of a loss in two, for one engine."""

    def __init__(self, context: SetUpContext):
        self._chunked = ChunkedLosses(context.request.options.chunked_loss)

    def cut(self, frame: "Frame") -> Optional[Callable]:
        if frame.block is not None or not torch.is_grad_enabled():
            return None
        split = self._chunked.cut_out(frame.gm, frame.inputs, frame.numbers, frame.compile_part)
        if split is None and frame.graph_id is not None:
            split = own_graph.split_loss(frame.gm, [value in frame.numbers for value in frame.inputs])
        if split is None:
            return None
        if hasattr(split, own_graph.HEAD):
            inputs = own_graph.inputs_of_head(split, frame.inputs)
            own_graph.replace(split, own_graph.HEAD, lambda head: frame.compile_graph(head, inputs))
        if hasattr(split, own_graph.REST):
            own_graph.replace(split, own_graph.REST, frame.compile_part)
        return split.forward


FEATURE = Loss
