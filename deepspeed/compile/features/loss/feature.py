# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gives the loss of a language model a graph of its own, or computes it in chunks.

Torch's caches need no hash of this source: their keys contain each graph that this part cuts off.
"""

import functools
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator

import torch

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.graph.backend import own_code
from ...zero_1_and_2.messages import warn
from . import own_graph
from .find_loss import ChunkedLosses

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ...zero_1_and_2.graph.backend import Frame


class Loss(Feature):
    """Cuts the graph of a loss in two, for one engine."""

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        if request.options.chunked_loss and not request.compiles:
            yield (
                "compile.chunked_loss=True has no effect, because torch.compile is switched off by "
                "compile_kwargs['disable'] or TORCH_COMPILE_DISABLE"
            )

    def __init__(self, context: SetUpContext):
        wanted = context.request.options.chunked_loss
        self._chunked = ChunkedLosses(wanted)
        self._awaits_loss, self._has_compiled = bool(wanted), False

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        self._has_compiled = self._has_compiled or torch.is_grad_enabled()
        if frame.layer is not None or not torch.is_grad_enabled():
            return compiled()
        part = functools.partial(compile_part, frame)
        split = self._chunked.cut_out(frame.gm, frame.inputs, frame.backend.numbers, part)
        if split is None:
            split = own_graph.split_loss(frame.gm, [value in frame.backend.numbers for value in frame.inputs])
        if split is None:
            return compiled()
        if hasattr(split, own_graph.HEAD):
            inputs = own_graph.inputs_of_head(split, frame.inputs)
            own_graph.replace(split, own_graph.HEAD, lambda head: frame.compile_graph(head, inputs))
        if hasattr(split, own_graph.REST):
            own_graph.replace(split, own_graph.REST, part)
        return split.forward

    def after_step(self, engine: "DeepSpeedEngine") -> None:
        # Before a graph is compiled, nothing tells where the loss is computed.
        if not (self._awaits_loss and self._has_compiled):
            return
        self._awaits_loss = False
        if not self._chunked.is_answered:
            warn(
                "compile.chunked_loss=True has no effect, because no compiled graph outside of blocks calls "
                "torch.nn.functional.cross_entropy; call it in the model's forward, in code that is compiled, or "
                "leave the option out"
            )


FEATURE = Loss


def compile_part(frame: "Frame", part: Callable) -> Callable:
    """Returns a part of a frame without registered parameters. The first call compiles it."""
    if not frame.backend.generates_code:
        return part

    # torch 2.11 does not compile a graph module that Dynamo has made, but compiles a function that calls one.
    def run_part(*args):
        return part(*args)

    arguments: Dict[str, Any] = {"mode": frame.mode, "options": frame.options, "dynamic": frame.backend.dynamic}
    return torch.compile(own_code(run_part), backend=frame.backend.compiler, **arguments)
