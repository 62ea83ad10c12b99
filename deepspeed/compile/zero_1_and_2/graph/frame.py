# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Compiles the graph of a frame, or parts of it, with reductions in the backward."""

import dataclasses
import functools
import types
from typing import Any, Callable, Dict, Optional, Sequence

import torch
from torch.fx import GraphModule

from .parameter_numbers import ParameterNumbers, one_more_input, traced_registrations
from .partitioner import ReduceGradPartitioner, Rewrite, Split
from .reductions import index_of


@dataclasses.dataclass(frozen=True, eq=False)
class CompileSettings:
    """How the graphs of an engine are compiled."""

    compiler: str  # "inductor", or "eager", with which graphs run as they are traced
    dynamic: Optional[bool]  # as in torch.compile
    debug_log: bool  # whether rewritten graphs are logged
    numbers: ParameterNumbers  # of the registered parameters
    are_aligned: bool  # whether all of these lie at addresses that Inductor takes for aligned
    # Methods of the engine's optional parts.
    rewrites: Sequence[Callable[[Sequence], Optional[Rewrite]]] = ()
    split: Optional[Callable[[Sequence], Split]] = None

    @property
    def generates_code(self) -> bool:
        return self.compiler != "eager"


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A frame that Dynamo has traced, while its graph is compiled."""

    gm: GraphModule  # the frame's graph as Dynamo traced it
    inputs: Sequence  # examples of the graph's inputs
    parameters: Sequence[torch.Tensor]  # those inputs that are registered parameters
    block: Optional[str]  # the name of the block's class if the frame is a block's: one graph may serve several layers
    graph_id: Optional[int]  # None if the frame reduces nothing
    release_reduce_buckets: bool  # whether the backward of this frame is the last that reduces
    mode: Optional[str]  # as in torch.compile
    options: Optional[Dict[str, Any]]  # as in torch.compile
    settings: CompileSettings

    @property
    def numbers(self) -> ParameterNumbers:
        """Says which inputs are registered parameters, and numbers them."""
        return self.settings.numbers

    def compile_graph(self, gm: GraphModule, inputs: Sequence) -> Callable:
        """Compiles the frame's graph, or a part of it, with reductions in its backward."""
        numbers = self.numbers
        reduced = [index for index, value in enumerate(inputs) if self.graph_id is not None and value in numbers]
        rewrites = (rewrite(inputs) for rewrite in self.settings.rewrites)
        partitioner = ReduceGradPartitioner(
            {index: slot for slot, index in enumerate(reduced, start=1)},
            self.graph_id,
            self.release_reduce_buckets,
            self.settings.debug_log,
            [not self.settings.are_aligned and value in numbers for value in inputs],
            [rewrite for rewrite in rewrites if rewrite is not None],
            self.settings.split and self.settings.split(inputs),
            # Inductor rearranges a graph, so lowering.py decides there.
            donates=not self.settings.generates_code,
        )
        if not reduced:
            return self._compile(gm, inputs, partitioner)
        tensor_for = numbers.tensor_for
        inputs = [*inputs, traced_registrations(tensor_for([inputs[index] for index in reduced]), inputs)]
        with one_more_input(gm):
            compiled = self._compile(gm, inputs, partitioner)
        # Dynamo keeps what it is given from being compiled. Without the compiler's own wrapper, it does so once.
        compiled = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        return lambda *args: compiled(*args, tensor_for([args[index] for index in reduced]))

    def _compile(self, gm, inputs, partitioner):
        if self.settings.generates_code:
            return _generate_code(gm, inputs, partitioner, self.mode, self.options)
        return run_as_traced(gm, inputs, partitioner)


def own_code(function: Callable) -> types.FunctionType:
    """Returns a copy, with a code object of its own, of a function that has no defaults.

    Dynamo counts compilations by code object, so it has counted none of the copy.
    """
    return types.FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)


def run_as_traced(gm: GraphModule, inputs: Sequence, partitioner: ReduceGradPartitioner) -> Callable:
    """Returns what runs a graph as it is traced, without generated code."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    # With boxed_nop, a graph drops each of its inputs after the last use, so a backward frees activations early.
    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partitioner)(gm, inputs)


def _generate_code(gm, example_inputs, partitioner, mode, options):
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {}), "custom_partitioner_fn": partitioner}
    if not any(partitioner.lies_anywhere):
        return compile_fx(gm, example_inputs, config_patches=patches)
    inner_compile = functools.partial(_compile_for_any_address, partitioner.lies_anywhere)
    return compile_fx(gm, example_inputs, inner_compile, config_patches=patches)


def _compile_for_any_address(lies_anywhere, gm, example_inputs, **kwargs):
    """Compiles a forward or backward graph that may be called with parameters at addresses of any alignment.

    A graph that serves several layers is compiled for one layer, and Inductor assumes that the other layers'
    parameters are aligned in the same way. This is not so in a flat tensor, where parameters of all sizes lie side by
    side.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    indices = {index for index, flag in enumerate(lies_anywhere) if flag}
    # torch's partitioner hands the placeholders of a joint graph on to the graphs that it splits it into.
    inputs = [
        _at_any_address(value) if index_of(node) in indices and isinstance(value, torch.Tensor) else value
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    ]
    return compile_fx_inner(gm, inputs, **kwargs)


def _at_any_address(example):
    """Returns a fake tensor like ``example`` that begins one element after the beginning of its memory."""
    numel = 1 + sum((size - 1) * stride for size, stride in zip(example.size(), example.stride()))
    with example.fake_mode:
        memory = torch.empty(numel + 1, dtype=example.dtype, device=example.device)
        return memory.as_strided(example.size(), example.stride(), 1)
