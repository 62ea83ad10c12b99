# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend of ZeRO-1/2: the usual compiler with reductions in the backward."""

import contextlib
import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch._inductor.utils import GPU_ALIGN_BYTES
from torch.fx import GraphModule

from ..feature import Feature, Request, only, overriding
from . import guards, lowering
from .frame import CompileSettings, Frame
from .parameter_numbers import ParameterNumbers


class Backend:
    """A ``torch.compile`` backend that reduces the gradients of parameters where they are produced.

    ``registered`` are the registered parameters, in the reducer's order. ``identity`` is the reducer's number.
    """

    def __init__(self, request: Request, registered: Sequence[torch.nn.Parameter], identity: int):
        lowering.register()
        # Keep no module: Dynamo's caches hold this backend after the engine is gone.
        self._settings = CompileSettings(
            request.backend,
            request.compile_kwargs.get("dynamic"),
            request.options.debug_log,
            ParameterNumbers(identity, registered),
            are_aligned=all(parameter.data_ptr() % GPU_ALIGN_BYTES == 0 for parameter in registered),
        )
        self._no_graph_is_last = False
        # Methods of the engine's optional parts.
        self._graph: List[Callable] = []
        self._compiling: List[Callable] = []
        self._cut: List[Callable] = []
        # Dynamo's number of a frame that reduces -> the frame's graph id, in forward order. Recompilations of a frame
        # share its number. Graph ids count from 0, so that a model gets the same graphs in every run and finds them in
        # torch's caches.
        self._graph_ids: Dict[int, int] = {}

    def use(self, features: Sequence[Feature]) -> None:
        """Has the optional parts of the engine, which are made after the backend, shape graphs too."""
        self._graph, self._compiling, self._cut = (
            overriding(features, method) for method in ("graph", "compiling", "cut")
        )
        self._settings = dataclasses.replace(
            self._settings, rewrites=overriding(features, "rewrite"), split=only(features, "split")
        )
        self._no_graph_is_last = any(feature.no_graph_is_last for feature in features)

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence,
        block: Optional[str] = None,
        mode: Optional[str] = None,
        options: Optional[Dict[str, Any]] = None,
    ) -> Callable:
        """Compiles a :class:`Frame`."""
        guards.guard_all()
        parameters = [value for value in example_inputs if value in self._settings.numbers]
        graph_id, is_last = self._place(parameters)
        frame = Frame(gm, example_inputs, parameters, block, graph_id, is_last, mode, options, self._settings)
        before = [graph(frame) for graph in self._graph]
        with contextlib.ExitStack() as stack:
            for compiling in self._compiling:
                stack.enter_context(compiling(frame))
            # The first part that cuts the graph compiles it.
            cuts = (cut(frame) for cut in self._cut)
            compiled = next((cut for cut in cuts if cut is not None), None) or frame.compile_graph(gm, example_inputs)
        return _preceded(compiled, [call for call in before if call is not None])

    def _place(self, parameters) -> Tuple[Optional[int], bool]:
        """Returns the graph id of a frame with these parameters, and whether its backward is the last that reduces.

        The inputs alone decide, whether or not the graph is found in a cache.
        """
        if not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)):
            # Evaluation gives a frame no place in the order: a rank that evaluates alone may run other frames, or run
            # frames in another order.
            return None, False
        number = torch._guards.CompileContext.current_compile_id().frame_id
        graph_id = self._graph_ids.setdefault(number, len(self._graph_ids))
        # Backwards run in the reverse of forward order, so the first frame reduces last. If no graph runs last in
        # every backward, finish_backward() releases buckets.
        return graph_id, graph_id == 0 and not self._no_graph_is_last


def _preceded(compiled, before):
    """Returns ``compiled`` with calls before each of its own."""
    if not before:
        return compiled

    def run(*args):
        for call in before:
            call()
        return compiled(*args)

    return run
