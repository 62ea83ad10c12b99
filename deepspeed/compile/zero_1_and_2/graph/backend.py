# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend of ZeRO-1/2: the usual compiler with reductions in the backward."""

import contextlib
import dataclasses
import functools
import types
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Set, Tuple

import torch
import torch._functorch.config
from torch.fx import GraphModule

from . import lowering
from .parameter_numbers import ParameterNumbers, one_more_input, traced_registrations
from .partitioner import ReduceGradPartitioner, Rewrite, Split


class Backend:
    """A ``torch.compile`` backend that reduces the gradients of parameters where they are produced.

    Args:
        compiler: "inductor", or "eager", with which graphs run as they are traced.
        dynamic: as in torch.compile.
        debug_log: whether rewritten graphs are logged.
        registered: the registered parameters, in the reducer's order.
        identity: the reducer's number.
    """

    def __init__(
        self,
        compiler: str,
        dynamic: Optional[bool],
        debug_log: bool,
        registered: Sequence[torch.nn.Parameter],
        identity: int,
    ):
        lowering.register()
        # Keep no module: Dynamo's caches hold this backend after the engine is gone.
        self.compiler, self.dynamic, self.debug_log = compiler, dynamic, debug_log
        # Says which inputs of a graph are registered parameters, and numbers them.
        self.numbers = ParameterNumbers(identity, registered)
        # Dynamo's number of a frame that reduces -> the frame's graph id, from 0 in forward order. Recompilations of a
        # frame share its number.
        self._graph_ids: Dict[int, int] = {}

        # Optional parts set the rest while the engine is set up. These two take examples of a joint graph's inputs.
        # Each returns a change to make before the joint graph is split, for example to save a parameter as its shard.
        self.rewrites: List[Callable[[Sequence], Optional[Rewrite]]] = []
        # Returns the partitioner to use in place of torch's own, for example to keep fewer activations.
        self.split: Optional[Callable[[Sequence], Split]] = None
        # Ids of parameters. One graph may be called with one of these or with another one, so it reduces neither.
        self.left_to_autograd: Set[int] = set()
        # The number of modules that a part compiles by themselves. From one on, nothing else may compile the engine's
        # module. From two on, no graph runs last in every backward.
        self.compiled_modules = 0
        # Methods of parts to call around each compilation.
        self.around_compile: Sequence[Callable] = ()

    @property
    def generates_code(self) -> bool:
        return self.compiler != "eager"

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence,
        layer: Optional[str] = None,
        mode: Optional[str] = None,
        options: Optional[Dict[str, Any]] = None,
        name: Optional[str] = None,
    ) -> Callable:
        """Compiles a :class:`Frame`. From 2.15 on torch passes ``name``, which is for its own backend."""
        parameters = [value for value in example_inputs if value in self.numbers]
        graph_id, is_last = self._place(parameters)
        frame = Frame(gm, example_inputs, parameters, layer, graph_id, is_last, mode, options, self)
        compiled = functools.partial(frame.compile_graph, gm, example_inputs)
        for around in reversed(self.around_compile):
            compiled = functools.partial(around, frame, compiled)
        return compiled()

    def _place(self, parameters) -> Tuple[Optional[int], bool]:
        """Returns the graph id of a frame with these parameters, and whether its backward is the last that reduces.

        This does not read the graph: a graph that torch finds in a cache takes its place in the order too.
        """
        if not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)):
            # Evaluation gives a frame no place in the order: a rank that evaluates alone may run other frames, or run
            # frames in another order.
            return None, False
        number = torch._guards.CompileContext.current_compile_id().frame_id
        graph_id = self._graph_ids.setdefault(number, len(self._graph_ids))
        # Backwards run in the reverse of forward order, so the first frame reduces last. If no graph runs last in
        # every backward, finish_backward() releases buckets.
        return graph_id, graph_id == 0 and self.compiled_modules < 2


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A frame that Dynamo has traced, while its graph is compiled."""

    gm: GraphModule  # the frame's graph as Dynamo traced it
    inputs: Sequence  # examples of the graph's inputs
    parameters: Sequence[torch.Tensor]  # the inputs that are registered parameters
    layer: Optional[str]  # the name of a layer's class if the frame is a layer's: one graph may serve several layers
    graph_id: Optional[int]  # None if the frame reduces nothing
    release_reduce_buckets: bool  # whether the backward of this frame is the last that reduces
    mode: Optional[str]  # as in torch.compile
    options: Optional[Dict[str, Any]]  # as in torch.compile
    backend: Backend  # the engine's

    def compile_graph(self, gm: GraphModule, inputs: Sequence) -> Callable:
        """Compiles the frame's graph, or a part of it, with reductions in its backward."""
        backend, numbers = self.backend, self.backend.numbers
        is_left = [id(value) in backend.left_to_autograd for value in inputs]
        reduced = [index for index, value in enumerate(inputs) if value in numbers and not is_left[index]]
        reduced = [] if self.graph_id is None else reduced
        rewrites = (rewrite(inputs) for rewrite in backend.rewrites)
        partitioner = ReduceGradPartitioner(
            {index: position for position, index in enumerate(reduced, start=1)},
            self.graph_id,
            self.release_reduce_buckets,
            backend.debug_log,
            [rewrite for rewrite in rewrites if rewrite is not None],
            backend.split and backend.split(inputs),
            # Inductor rearranges a graph, so lowering.py decides there.
            donates=not backend.generates_code,
        )
        if not reduced:
            return self._compile(gm, inputs, partitioner)
        tensor_for = numbers.tensor_for
        inputs = [*inputs, traced_registrations(tensor_for([inputs[index] for index in reduced]), inputs)]
        with one_more_input(gm):
            compiled = self._compile(gm, inputs, partitioner)
        # Dynamo wraps this function so that nothing compiles it. Remove the compiler's own such wrapper.
        compiled = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        return lambda *args: compiled(*args, tensor_for([args[index] for index in reduced]))

    def _compile(self, gm, inputs, partitioner):
        with _checkpointing_ignored_without_gradients():
            if self.backend.generates_code:
                return _generate_code(gm, inputs, partitioner, self.mode, self.options)
            return run_as_traced(gm, inputs, partitioner)


def _checkpointing_ignored_without_gradients() -> ContextManager[Any]:
    """Returns a context in which torch ignores checkpointing in graphs that record no gradient.

    Such a graph, for example of frozen layers below the first trained one, has no backward that recomputes anything.
    Torch looks for one all the same, and raises where a checkpointed function draws random numbers, as dropout does.
    """
    config, option = torch._functorch.config, "remat_using_tags_for_fwd_loss_bwd_graph"
    # Releases of torch that lack the option do not look.
    return config.patch({option: False}) if hasattr(config, option) else contextlib.nullcontext()


def own_code(function: Callable) -> types.FunctionType:
    """Returns a copy, with a code object of its own, of a function that has no defaults.

    Dynamo counts compilations by code object, so it has counted none of the copy.
    """
    return types.FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)


def run_as_traced(gm: GraphModule, inputs: Sequence, partitioner: ReduceGradPartitioner) -> Callable:
    """Returns a function that runs a graph as traced, without generated code."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    # With boxed_nop, a graph drops each of its inputs after the last use, so a backward frees activations early.
    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partitioner)(gm, inputs)


def patches_of(mode: Optional[str], options: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """Returns the changes of Inductor's configuration that a mode and options of torch.compile ask for."""
    from torch._inductor import list_mode_options

    # In names of options, torch takes a dash for an underscore.
    named = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    return {**(list_mode_options(mode) if mode else {}), **named}


def _generate_code(gm, example_inputs, partitioner, mode, options):
    from torch._inductor.compile_fx import compile_fx

    patches = {**patches_of(mode, options), "custom_partitioner_fn": partitioner}
    # A graph that serves several layers is compiled for one. Inductor takes the others' parameters for aligned too,
    # and they are: shards of all parameters have a multiple of SHARD_MULTIPLE elements.
    return compile_fx(gm, example_inputs, config_patches=patches)
