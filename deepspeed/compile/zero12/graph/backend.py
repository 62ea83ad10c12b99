# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend of ZeRO-1/2: the usual compiler with reductions in the backward."""

import contextlib
import dataclasses
import functools
import hashlib
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.utils import GPU_ALIGN_BYTES
from torch.fx import GraphModule

from deepspeed.utils import logger

from ...fx import should_release_reduce_buckets
from ..feature import Feature, overriding
from . import find_loss, guards, loss, lowering, reasons
from .compilation_limit import CompilationLimit, own_code
from .frames import Registrations, one_more_input, traced_registrations
from .reductions import donate_gradients, finish_backward_graph, index_of, insert_reductions
from .split import save_by_hooks, split_joint

if TYPE_CHECKING:
    from ..gather_hooks import Waiting
    from ..options import Plan


# Elements of a buffer that may be kept in a copy for each layer and forward. Statistics and scales have fewer, and
# quantized weights, which are buffers in some packages, have more.
SMALL_BUFFER = 2**16


@functools.cache
def cache_key() -> str:
    """Hashes all source that shapes generated code, so that torch's caches return no code of another version."""
    folder = Path(__file__).parent
    shaping = [*sorted(folder.glob("*.py")), folder.parent / "native.py", *sorted(folder.parents[1].glob("fx*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in shaping)).hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class ReduceGradPartitioner(CustomPartitionerFn):
    """Inserts the reductions, then splits the joint graph as torch would, within a budget for activations.

    Attributes:
        slots: index of a graph's input that is reduced -> its slot in the registrations.
        graph_id: the frame's graph id, or None if the frame reduces nothing.
        release_reduce_buckets: whether the backward of this graph is the last that reduces.
        debug_log: whether to log the split graphs.
        lies_anywhere: for each input of the graph, whether it may lie at an address of any alignment.
        budget, buffers: as in :func:`split_joint`.
        sharded: indices of the graph's inputs that are sharded between its forward and its backward.
    """

    slots: Mapping[int, int]
    graph_id: Optional[int]
    release_reduce_buckets: bool
    debug_log: bool
    lies_anywhere: Sequence[bool]
    budget: Optional[float]
    sharded: Sequence[int] = ()
    buffers: Sequence[int] = ()

    def uuid(self) -> bytes:
        """Identifies this partitioner in the keys of torch's caches."""
        schema = str(torch.ops.deepcompile.reduce_grad.default._schema)
        slots = sorted(self.slots.items())
        how = self.graph_id, self.release_reduce_buckets, self.lies_anywhere, self.budget, self.sharded, self.buffers
        key = cache_key(), schema, slots, *how
        return hashlib.sha256(repr(key).encode()).digest()

    def __call__(self, gm: GraphModule, joint_inputs: Sequence, **kwargs: Any) -> Tuple[GraphModule, GraphModule]:
        insert_reductions(gm, self.slots)
        save_by_hooks(gm, self.sharded)
        forward, backward = split_joint(gm, joint_inputs, self.budget, self.buffers, **kwargs)
        finish_backward_graph(backward, self.graph_id, self.release_reduce_buckets)
        if kwargs.get("compiler") != "inductor":
            donate_gradients(backward)
        if self.debug_log:
            logger.info(f"DeepCompile graph {self.graph_id}, forward:\n{forward.graph}\nbackward:\n{backward.graph}")
        return forward, backward


class _Frame(NamedTuple):
    """How the graph of one frame is compiled.

    Attributes:
        graph_id: the frame's graph id, or None if the frame reduces nothing.
        release_reduce_buckets: whether the backward of this frame is the last that reduces.
        mode, options: as in ``torch.compile``.
    """

    graph_id: Optional[int]
    release_reduce_buckets: bool
    mode: Optional[str]
    options: Optional[Dict[str, Any]]


class Backend:
    """A ``torch.compile`` backend that reduces the gradients of parameters where they are produced.

    Args:
        module: the engine's.
        plan: the ``Plan`` of the engine. With its backend "eager", graphs run as they are traced.
        registered: the registered parameters, in the reducer's order, which outlive the backend's graphs.
        identity: the reducer's number.
        limit: the ``CompilationLimit`` of the engine.
        features: the optional parts of the engine.
        waiting: None, or a ``Waiting`` for parameters that may be on their way.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        plan: "Plan",
        registered: Sequence[torch.nn.Parameter],
        identity: int,
        limit: CompilationLimit,
        features: Sequence[Feature],
        waiting: Optional["Waiting"] = None,
    ):
        lowering.register()
        # Keep neither module nor plan, which holds the blocks: Dynamo's caches hold this backend after the engine is
        # gone.
        self._module = weakref.ref(module)
        self._compiler, self._dynamic, self._debug_log = plan.backend, plan.dynamic, plan.debug_log
        self._budget, self._shards = plan.activation_budget, plan.shards_frozen
        self._has_blocks = bool(plan.blocks)
        self._limit, self._waiting = limit, waiting
        self._compiling = overriding(features, "compiling")
        self._registrations = Registrations(identity, registered)
        self._own = {id(parameter) for parameter in registered}
        self._are_aligned = all(parameter.data_ptr() % GPU_ALIGN_BYTES == 0 for parameter in registered)
        self._chunked_losses = find_loss.ChunkedLosses(plan.chunked_loss, self._registrations, self._own)
        # Dynamo's number of a frame that reduces -> the frame's graph id, in forward order. Recompilations of a frame
        # share its number. Graph ids count from 0, so that a model gets the same graphs in every run and finds them in
        # torch's caches.
        self._graph_ids: Dict[int, int] = {}

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence,
        block: Optional[str] = None,
        mode: Optional[str] = None,
        options: Optional[Dict[str, Any]] = None,
    ) -> Callable:
        """Compiles a frame.

        Args:
            gm, example_inputs: the frame's graph, and examples of its inputs.
            block: the name of the block's class, if the frame is a block's. One graph may then serve several layers.
            mode, options: as in ``torch.compile``.
        """
        guards.guard_all()
        frame = _Frame(*self._reductions(gm, example_inputs, block), mode, options)
        with contextlib.ExitStack() as stack:
            for compiling in self._compiling:
                stack.enter_context(compiling(block, frame.graph_id))
            return self._compile_frame(gm, example_inputs, block, frame)

    def _compile_frame(self, gm, example_inputs, block, frame):
        split = None
        if block is None and torch.is_grad_enabled():
            split = self._chunked_losses.cut_out(gm, example_inputs, lambda part: self._part(part, frame))
            if split is None and frame.graph_id is not None:
                split = loss.split_loss(gm, [id(value) in self._own for value in example_inputs])
        if split is None:
            compiled = self._graph(gm, example_inputs, frame)
        else:
            compiled = split.forward
            if hasattr(split, loss.HEAD):
                inputs = loss.inputs_of_head(split, example_inputs)
                loss.replace(split, loss.HEAD, lambda head: self._graph(head, inputs, frame))
            if hasattr(split, loss.REST):
                loss.replace(split, loss.REST, lambda rest: self._part(rest, frame))
        before = self._waiting and self._waiting.before_graph(example_inputs)
        return _preceded(compiled, before) if before else compiled

    def _reductions(self, gm, example_inputs, block) -> Tuple[Optional[int], bool]:
        """Returns the graph id and whether to release buckets, as in a :class:`_Frame`.

        The inputs alone decide, whether or not the graph is found in a cache.
        """
        parameters = [value for value in example_inputs if id(value) in self._own]
        if not parameters:
            # A frame without registered parameters, such as a function that logs metrics by name, does not change what
            # is reduced, so Dynamo's own limit applies to it.
            return None, False
        compile_id = torch._guards.CompileContext.current_compile_id()
        graph_break = reasons.graph_break(gm)
        self._limit.compiles(compile_id.frame_id, compile_id.frame_compile_id + 1, block or "the model", graph_break)
        if not (torch.is_grad_enabled() and any(value.requires_grad for value in parameters)):
            # Evaluation gives a frame no place in the order: a rank that evaluates alone may run other frames, or run
            # frames in another order.
            return None, False
        graph_id = self._graph_ids.setdefault(compile_id.frame_id, len(self._graph_ids))
        order = [(each, True) for each in self._graph_ids.values()]
        # If blocks have graphs of their own, no graph runs last in every backward: finish_backward() then releases.
        return graph_id, not self._has_blocks and should_release_reduce_buckets(order, graph_id)

    def _graph(self, gm, inputs, frame):
        """Compiles a graph, or its part up to the loss, with reductions in its backward."""
        reduces = frame.graph_id is not None
        reduced = [index for index, value in enumerate(inputs) if reduces and id(value) in self._own]
        slots = {index: slot for slot, index in enumerate(reduced, start=1)}
        lies_anywhere = [not self._are_aligned and id(value) in self._own for value in inputs]
        sharded = [
            index
            for index, value in enumerate(inputs)
            if self._shards and isinstance(value, torch.nn.Parameter) and not value.requires_grad
        ]
        partitioner = ReduceGradPartitioner(
            slots,
            frame.graph_id,
            frame.release_reduce_buckets,
            self._debug_log,
            lies_anywhere,
            self._budget,
            sharded,
            self._small_buffers(inputs),
        )
        if not reduced:
            return self._compile(gm, inputs, frame, partitioner)
        of = self._registrations.of
        inputs = [*inputs, traced_registrations(of([inputs[index] for index in reduced]), inputs)]
        with one_more_input(gm):
            compiled = self._compile(gm, inputs, frame, partitioner)
        # Dynamo keeps what it is given from being compiled. Without the compiler's own wrapper, it does so once.
        compiled = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        return lambda *args: compiled(*args, of([args[index] for index in reduced]))

    def _small_buffers(self, inputs):
        """Returns the indices of inputs that are buffers of the model and small beside activations."""
        module = self._module()
        # A model may not be asked for its truth.
        all_buffers = () if module is None else module.buffers()
        buffers = {id(buffer) for buffer in all_buffers if buffer.numel() <= SMALL_BUFFER}
        return [index for index, value in enumerate(inputs) if id(value) in buffers]

    def _compile(self, gm, inputs, frame, partitioner):
        if self._compiler == "eager":
            return _run_as_traced(gm, inputs, partitioner)
        return _generate_code(gm, inputs, partitioner, frame.mode, frame.options)

    def _part(self, part, frame):
        """Returns a part of a graph that has no parameters of the engine, to be compiled when it is called."""
        if self._compiler == "eager":
            return part

        # torch 2.11 does not compile a graph module that Dynamo has made, but compiles a function that calls one.
        def run_part(*args):
            return part(*args)

        arguments = {"mode": frame.mode, "options": frame.options, "dynamic": self._dynamic}
        return torch.compile(own_code(run_part), backend=self._compiler, **arguments)


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
