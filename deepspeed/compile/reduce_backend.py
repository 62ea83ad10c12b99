# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend of ZeRO-1/2: the usual compiler with reductions in the backward."""

import functools
import hashlib
import inspect
import logging
import sys
from typing import Dict, List, Tuple

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.utils import GPU_ALIGN_BYTES

from deepspeed.utils import log_dist, logger

from . import fx, loss_graph, native, reduce_lowering
from .fx import should_release_reduce_buckets
from .passes import zero_1_and_2_compile
from .passes.zero_1_and_2_compile import finish_backward_graph, give_gradients_away, insert_reductions


class GraphOrder:
    """The frames of one engine in forward order.

    Frames are told apart by Dynamo's frame number, which recompilations of a frame share. Ids are small and count
    from 0, so that the same model gets the same graphs, and finds them in torch's caches, in every run.
    """

    def __init__(self):
        self._entries: Dict[int, Tuple[int, bool]] = {}

    def add(self, frame: int, reduces: bool) -> int:
        """Records that ``frame`` was compiled and returns its graph id."""
        # Evaluation may compile a frame first; it counts as reducing once it is compiled for training.
        graph_id, reduced = self._entries.get(frame, (len(self._entries), False))
        self._entries[frame] = (graph_id, reduced or reduces)
        return graph_id

    def as_list(self) -> List[Tuple[int, bool]]:
        """Returns (graph id, whether it reduces) of each frame, in forward order."""
        return list(self._entries.values())


class CompilationLimit:
    """Gives blocks that differ from one another room to be compiled each, and raises where that is not enough.

    All blocks of a class share torch's limit of compilations of one frame. Beyond it Dynamo leaves the frame
    uncompiled, whichever block it is then called for. On another rank that may be another block, and ranks would no
    longer reduce in one order.

    Args:
        limit: compilations of one frame.

    Attributes:
        is_near: whether blocks should be called under :meth:`raised`. That takes microseconds, and most need it never.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self.is_near = False
        self._has_warned = False

    def raised(self):
        """Returns a context in which Dynamo compiles a frame once more than the limit, so that it is noticed."""
        config = torch._dynamo.config
        return config.patch(
            recompile_limit=self._limit + 1,
            accumulated_recompile_limit=max(self._limit + 1, config.accumulated_recompile_limit),
        )

    def check(self, compilations: int) -> None:
        """Called with how often a frame of a block was compiled, this time included."""
        self.is_near = self.is_near or 2 * compilations >= torch._dynamo.config.recompile_limit
        if compilations > self._limit:
            raise RuntimeError(
                f"DeepCompile compiled one frame of the model's blocks {self._limit} times, because the blocks or "
                "their inputs differ each time; make them alike, raise torch._dynamo.config.recompile_limit before "
                "engine.compile(), or set compile.regional_compilation to false"
            )
        if compilations > 4 and not self._has_warned:
            self._has_warned = True
            log_dist(
                "DeepCompile compiles the model's blocks again and again, because they or their inputs differ. Those "
                "of transformers do so with a cache of keys and values: load the model with use_cache=False",
                ranks=[0],
                level=logging.WARNING,
            )


class ReduceGradPartitioner(CustomPartitionerFn):
    """Inserts the reductions, then splits the joint graph as torch would."""

    def __init__(self, is_parameter, graph_id, release_reduce_buckets, debug_log, lies_anywhere):
        self.is_parameter = tuple(is_parameter)
        self.graph_id = graph_id
        self.release_reduce_buckets = release_reduce_buckets
        self.debug_log = debug_log
        self.lies_anywhere = tuple(lies_anywhere)
        self.names_lying_anywhere = frozenset()

    def uuid(self):
        # Everything that shapes the generated code: torch's caches must not give us what another version wrote.
        modules = (fx, native, reduce_lowering, zero_1_and_2_compile, sys.modules[__name__])
        sources = [inspect.getsource(module) for module in modules]
        schema = torch.ops.deepcompile.reduce_grad.default._schema
        key = (sources, str(schema), self.is_parameter, self.graph_id, self.release_reduce_buckets, self.lies_anywhere)
        return hashlib.sha256(repr(key).encode()).digest()

    def __call__(self, gm, joint_inputs, **kwargs):
        primals = gm.graph.find_nodes(op="placeholder")
        self.names_lying_anywhere = {node.name for node, flag in zip(primals, self.lies_anywhere) if flag}
        insert_reductions(gm, self.is_parameter)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        finish_backward_graph(backward, self.graph_id, self.release_reduce_buckets)
        if kwargs.get("compiler") != "inductor":
            give_gradients_away(backward)
        if self.debug_log:
            logger.info(f"DeepCompile graph {self.graph_id}, forward:\n{forward.graph}\nbackward:\n{backward.graph}")
        return forward, backward


def make_backend(backend, parameters, registered, debug_log=False, limit=None, waiting=None, dynamic=None):
    """Returns a ``torch.compile`` backend that reduces the gradients of ``parameters`` where they are produced.

    Args:
        backend: "inductor", or "eager" to run the traced graphs without generating code.
        parameters: those of ``registered`` that graphs may reduce, the same on every rank.
        registered: all that lie in the optimizer's flat tensors. They outlive the backend's graphs.
        debug_log: whether to log each pair of graphs.
        limit: the CompilationLimit of blocks, or None. Where there are blocks, no graph ends with a flush.
        waiting: None, or a ``Waiting`` for parameters that may be on their way.
        dynamic: as of ``torch.compile``, for a loss that is compiled by itself.

    The backend takes ``in_block``, whether a graph belongs to a block that may be called for several layers, and
    the ``mode`` and ``options`` of ``torch.compile`` as keyword arguments.
    """
    reduce_lowering.register()
    reducible = {id(parameter) for parameter in parameters}
    aligned = all(parameter.data_ptr() % GPU_ALIGN_BYTES == 0 for parameter in registered)
    registered = {id(parameter) for parameter in registered}
    anywhere = frozenset() if aligned else registered
    order = GraphOrder()

    def compile_frame(gm, example_inputs, in_block=False, mode=None, options=None):
        # Decided by the inputs alone, so that every rank decides alike whether or not it finds the graph in a cache.
        is_parameter = [id(value) in reducible for value in example_inputs]
        reduces = torch.is_grad_enabled() and any(
            flag and value.requires_grad for flag, value in zip(is_parameter, example_inputs)
        )
        compile_id = torch._guards.CompileContext.current_compile_id()
        graph_id = order.add(compile_id.frame_id, reduces)
        release = limit is None and should_release_reduce_buckets(order.as_list(), graph_id)
        if in_block:
            limit.check(compile_id.frame_compile_id + 1)

        def compile_graph(graph_module, inputs):
            is_parameter = [id(value) in reducible for value in inputs]
            lies_anywhere = [id(value) in anywhere for value in inputs]
            partitioner = ReduceGradPartitioner(is_parameter, graph_id, release, debug_log, lies_anywhere)
            if backend == "eager":
                return _run_as_traced(graph_module, inputs, partitioner)
            return _generate_code(graph_module, inputs, partitioner, mode, options)

        is_registered = [id(value) in registered for value in example_inputs]
        split = loss_graph.split_loss(gm, is_registered) if reduces and not in_block else None
        if split is None:
            compiled = compile_graph(gm, example_inputs)
        else:
            inputs = loss_graph.inputs_of_head(split, example_inputs)
            loss_graph.replace(split, loss_graph.HEAD, lambda head: compile_graph(head, inputs))
            if backend != "eager":
                arguments = {"backend": backend, "mode": mode, "options": options, "dynamic": dynamic}
                loss_graph.replace(split, loss_graph.LOSS, lambda loss: loss_graph.compile_loss(loss, **arguments))
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
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def run(graph_module, _inputs):
        return make_boxed_func(graph_module.forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partitioner)(gm, example_inputs)


def _generate_code(gm, example_inputs, partitioner, mode, options):
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {}), "custom_partitioner_fn": partitioner}
    if not any(partitioner.lies_anywhere):
        return compile_fx(gm, example_inputs, config_patches=patches)
    inner_compile = functools.partial(_compile_for_any_address, partitioner)
    return compile_fx(gm, example_inputs, inner_compile, config_patches=patches)


def _compile_for_any_address(partitioner, gm, example_inputs, **kwargs):
    """Compiles a forward or backward graph that may be given a parameter at an address of any alignment.

    A graph that serves several layers is compiled for one of them, and Inductor takes it that parameters of the others
    lie as well aligned. In a flat tensor they lie behind each other, whatever their sizes.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = [
        _at_any_address(value) if node.name in partitioner.names_lying_anywhere else value
        for node, value in zip(placeholders, example_inputs, strict=True)
    ]
    return compile_fx_inner(gm, inputs, **kwargs)


def _at_any_address(example):
    """Returns a fake tensor like ``example`` that begins one element behind the beginning of its memory."""
    numel = 1 + sum((size - 1) * stride for size, stride in zip(example.size(), example.stride()))
    with example.fake_mode:
        memory = torch.empty(numel + 1, dtype=example.dtype, device=example.device)
        return memory.as_strided(example.size(), example.stride(), 1)
