# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend of ZeRO-1/2: the usual compiler with reductions in the backward."""

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.utils import GPU_ALIGN_BYTES
from torch.fx import GraphModule

from deepspeed.utils import logger

from ...fx import should_release_reduce_buckets
from . import find_loss, hook_guards, loss, lowering
from .compilation_limit import CompilationLimit
from .frames import Registrations, one_more_input, traced_registrations
from .progress import Progress
from .reductions import donate_gradients, finish_backward_graph, insert_reductions

if TYPE_CHECKING:
    from ..gather_hooks import Waiting
    from ..options import Plan


class GraphOrder:
    """The frames of one engine that reduce, in forward order, and their graph ids.

    Dynamo's frame number identifies a frame, and recompilations of a frame share the number. A frame gets its place
    when it is first compiled for training. Evaluation does not count, because a rank that evaluates alone may run
    other frames, or run frames in another order. Graph ids count from 0, so that a model gets the same graphs in every
    run and finds them in torch's caches.
    """

    def __init__(self):
        self._ids: Dict[int, int] = {}

    def add(self, frame: int) -> int:
        """Records that ``frame`` was compiled with reductions and returns its graph id."""
        return self._ids.setdefault(frame, len(self._ids))

    def as_list(self) -> List[Tuple[int, bool]]:
        """Returns (graph id, True) for each frame, in forward order, for ``should_release_reduce_buckets()``."""
        return [(graph_id, True) for graph_id in self._ids.values()]


# The graph id of a frame that reduces nothing.
NO_GRAPH = -1


@functools.cache
def cache_key() -> str:
    """Hashes all source that shapes generated code, so that torch's caches return no code of another version."""
    folder = Path(__file__).parent
    shaping = [*sorted(folder.glob("*.py")), folder.parent / "native.py", *sorted(folder.parents[1].glob("fx*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in shaping)).hexdigest()


class ReduceGradPartitioner(CustomPartitionerFn):
    """Inserts the reductions, then splits the joint graph as torch would.

    Args:
        slots: index of a graph's input that is reduced -> its slot in the registrations.
        graph_id: the frame's graph id.
        release_reduce_buckets: whether the backward of this graph is the last that reduces.
        debug_log: whether to log the split graphs.
        lies_anywhere: for each input of the graph, whether it may lie at an address of any alignment.
    """

    def __init__(
        self,
        slots: Mapping[int, int],
        graph_id: int,
        release_reduce_buckets: bool,
        debug_log: bool,
        lies_anywhere: Sequence[bool],
    ):
        self.slots = dict(slots)
        self.graph_id = graph_id
        self.release_reduce_buckets = release_reduce_buckets
        self.debug_log = debug_log
        self.lies_anywhere = tuple(lies_anywhere)
        # Names of the inputs that may lie at any address. None until the partitioner runs, which happens only for
        # graphs with a backward.
        self.names_lying_anywhere: Optional[Set[str]] = None

    def uuid(self) -> bytes:
        """Identifies this partitioner in the keys of torch's caches."""
        schema = str(torch.ops.deepcompile.reduce_grad.default._schema)
        slots = sorted(self.slots.items())
        key = (cache_key(), schema, slots, self.graph_id, self.release_reduce_buckets, self.lies_anywhere)
        return hashlib.sha256(repr(key).encode()).digest()

    def __call__(self, gm: GraphModule, joint_inputs: Sequence, **kwargs: Any) -> Tuple[GraphModule, GraphModule]:
        primals = gm.graph.find_nodes(op="placeholder")
        self.names_lying_anywhere = {node.name for node, flag in zip(primals, self.lies_anywhere) if flag}
        insert_reductions(gm, self.slots)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        finish_backward_graph(backward, self.graph_id, self.release_reduce_buckets)
        if kwargs.get("compiler") != "inductor":
            donate_gradients(backward)
        if self.debug_log:
            logger.info(f"DeepCompile graph {self.graph_id}, forward:\n{forward.graph}\nbackward:\n{backward.graph}")
        return forward, backward


def make_backend(
    plan: "Plan",
    parameters: Iterable[torch.nn.Parameter],
    registered: Sequence[torch.nn.Parameter],
    identity: int,
    limit: CompilationLimit,
    progress: Progress,
    waiting: Optional["Waiting"] = None,
) -> Callable:
    """Returns a ``torch.compile`` backend that reduces the gradients of ``parameters`` where they are produced.

    Args:
        plan: the ``Plan`` of the engine. With its backend "eager", graphs run as they are traced.
        parameters: the reducible parameters.
        registered: the registered parameters, in the reducer's order, which outlive the backend's graphs.
        identity: the reducer's number.
        limit: the ``CompilationLimit`` of the engine.
        progress: what tells the user of each compilation.
        waiting: None, or a ``Waiting`` for parameters that may be on their way.

    Returns:
        The backend. Besides a frame's graph and example inputs, it takes the keyword arguments ``block`` (the name of
        the block's class, if the frame is a block's, so that one graph may serve several layers), and ``mode`` and
        ``options`` as in ``torch.compile``.
    """
    # Do not keep the plan, which holds the blocks: Dynamo's caches hold this backend after the engine is gone.
    backend, dynamic, debug_log, has_blocks = plan.backend, plan.dynamic, plan.debug_log, bool(plan.blocks)
    lowering.register()
    registrations = Registrations(identity, registered)
    reducible = {id(parameter) for parameter in parameters}
    aligned = all(parameter.data_ptr() % GPU_ALIGN_BYTES == 0 for parameter in registered)
    own = {id(parameter) for parameter in registered}
    anywhere = frozenset() if aligned else own
    chunked_losses = find_loss.ChunkedLosses(plan.chunked_loss, registrations, own, reducible)
    order = GraphOrder()

    def compile_with(partitioner, gm, inputs, mode, options):
        if backend == "eager":
            return _run_as_traced(gm, inputs, partitioner)
        return _generate_code(gm, inputs, partitioner, mode, options)

    def compile_frame(gm, example_inputs, block=None, mode=None, options=None):
        hook_guards.guard()
        # Decide by the inputs alone, whether or not the graph is found in a cache.
        is_reducible = [id(value) in reducible for value in example_inputs]
        reduces = torch.is_grad_enabled() and any(
            flag and value.requires_grad for flag, value in zip(is_reducible, example_inputs)
        )
        compile_id = torch._guards.CompileContext.current_compile_id()
        if any(is_reducible):
            # Count only frames with reducible parameters. Other frames, such as a function that logs metrics by name,
            # do not change what is reduced, so Dynamo's own limit applies to them.
            limit.compiles(compile_id.frame_id, compile_id.frame_compile_id + 1)
        graph_id = order.add(compile_id.frame_id) if reduces else NO_GRAPH
        progress.compiles(block, graph_id if reduces else None)
        # If blocks have graphs of their own, no graph runs last in every backward: finish_backward() then releases.
        release = reduces and not has_blocks and should_release_reduce_buckets(order.as_list(), graph_id)

        def compile_graph(graph_module, inputs):
            reduced = [index for index, value in enumerate(inputs) if reduces and id(value) in reducible]
            slots = {index: slot for slot, index in enumerate(reduced, start=1)}
            lies_anywhere = [id(value) in anywhere for value in inputs]
            partitioner = ReduceGradPartitioner(slots, graph_id, release, debug_log, lies_anywhere)
            if not reduced:
                return compile_with(partitioner, graph_module, inputs, mode, options)
            made = registrations.of([inputs[index] for index in reduced])
            inputs = [*inputs, traced_registrations(made, inputs)]
            with one_more_input(graph_module):
                compiled = compile_with(partitioner, graph_module, inputs, mode, options)
            return lambda *args: compiled(*args, registrations.of([args[index] for index in reduced]))

        def compile_part(part):
            if backend == "eager":
                return part
            return loss.compile_loss(part, backend=backend, mode=mode, options=options, dynamic=dynamic)

        split = None
        if block is None and torch.is_grad_enabled():
            split, rest = chunked_losses.cut_out(gm, example_inputs, compile_part), loss.AFTER_CHUNKED_LOSS
        if split is None and block is None and reduces:
            split, rest = loss.split_loss(gm, [id(value) in own for value in example_inputs]), loss.LOSS
        if split is None:
            compiled = compile_graph(gm, example_inputs)
        else:
            if hasattr(split, loss.HEAD):
                inputs = loss.inputs_of_head(split, example_inputs)
                loss.replace(split, loss.HEAD, lambda head: compile_graph(head, inputs))
            if hasattr(split, rest):
                loss.replace(split, rest, compile_part)
            compiled = split.forward
        before = waiting and waiting.before_graph(example_inputs)
        return _preceded(compiled, before) if before else compiled

    return compile_frame


def _preceded(compiled, before):
    def run(*args):
        before()
        return compiled(*args)

    return run


def _run_as_traced(gm, example_inputs, partitioner):
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    # With boxed_nop, a graph drops each of its inputs after the last use, so a backward frees activations early.
    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partitioner)(gm, example_inputs)


def _generate_code(gm, example_inputs, partitioner, mode, options):
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {}), "custom_partitioner_fn": partitioner}
    if not any(partitioner.lies_anywhere):
        return compile_fx(gm, example_inputs, config_patches=patches)
    inner_compile = functools.partial(_compile_for_any_address, partitioner)
    return compile_fx(gm, example_inputs, inner_compile, config_patches=patches)


def _compile_for_any_address(partitioner, gm, example_inputs, **kwargs):
    """Compiles a forward or backward graph that may be called with parameters at addresses of any alignment.

    A graph that serves several layers is compiled for one layer, and Inductor assumes that the other layers'
    parameters are aligned in the same way. This is not so in a flat tensor, where parameters of all sizes lie side by
    side.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    placeholders = gm.graph.find_nodes(op="placeholder")
    names = partitioner.names_lying_anywhere
    if names is None:
        # The partitioner did not run: this is a forward without gradients, for example under checkpointing. The
        # graph's inputs are those of the frame.
        names = {node.name for node, flag in zip(placeholders, partitioner.lies_anywhere) if flag}
    inputs = [
        _at_any_address(value) if node.name in names and isinstance(value, torch.Tensor) else value
        for node, value in zip(placeholders, example_inputs, strict=True)
    ]
    return compile_fx_inner(gm, inputs, **kwargs)


def _at_any_address(example):
    """Returns a fake tensor like ``example`` that begins one element after the beginning of its memory."""
    numel = 1 + sum((size - 1) * stride for size, stride in zip(example.size(), example.stride()))
    with example.fake_mode:
        memory = torch.empty(numel + 1, dtype=example.dtype, device=example.device)
        return memory.as_strided(example.size(), example.stride(), 1)
