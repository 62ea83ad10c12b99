# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Sets an engine up for DeepCompile ZeRO-1/2, and undoes the setup when the engine is destroyed."""

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

from ..collectives import collective, every_rank_raises, of_first_rank
from ..feature import Feature, Request, SetUpContext, classes, only, overriding
from ..gradient.native import Reducer, reducer_module
from ..gradient.registered import registered_parameters
from ..graph.backend import Backend
from ..layout import Layout, layouts_of
from ..own_thread import in_own_thread
from ..parameter.placement import Placement
from ..step.even_order import adopt
from ..step.optimizer import attach, take_over_parameters
from .options import check_options, overlaps_reduction
from .state import EngineState

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ...config import CompileConfig

_last_identity = 0
# Elements with which a bucket is sent; see send_numel().
SEND_NUMEL = 2**25
SEND_NUMEL_OF_A_RANK = 2**20


def set_up(
    engine: "DeepSpeedEngine",
    backend: str,
    compile_config: "CompileConfig",
    compile_kwargs: Dict[str, Any],
    schedule: Optional[List],
    use_z2: bool = False,
) -> Callable:
    """Prepares an engine and returns the backend with which to compile its module.

    Each step that changes how the engine or its module runs adds a function to ``undo`` that reverts the change. If a
    later step raises, these functions run at once, and the engine trains as before, or refuses to train if the
    optimizer was changed already. Otherwise they run at the engine's end. An earlier ``compile()`` of a part of the
    module is not restored.

    The arguments are those of the base. ``backend`` is "inductor" or "eager". ``schedule`` is None, or the default
    schedule, which runs this stage's own pass at step 0. The base also passes the section ``compile`` and the stage,
    which this function reads from the engine.

    Raises:
        ValueError: if ZeRO-1/2 under DeepCompile cannot honour an option. The message names the option and says what
            to do. The engine is then unchanged. Also if another engine has compiled the module. Earlier engines of the
            same parameters have then been stopped.
    """
    # The caller may compile the engine within any context, for example in the first forward within torch.func.grad().
    return in_own_thread(_set_up, Request(engine, backend, compile_kwargs, schedule, is_call=True))


def _set_up(request):
    engine, group = request.engine, request.engine.seq_data_parallel_group
    with every_rank_raises("set an engine up", group):
        check_options(request)
        reducer_module()
    identity, optimizer = _next_identity(engine.optimizer), engine.optimizer

    with contextlib.ExitStack() as undo:
        with every_rank_raises("set an engine up", group):
            take_over_parameters(optimizer)
            reducer = make_reducer(request, identity)
            undo.callback(reducer.close)
            dynamic, registered = request.compile_kwargs.get("dynamic"), registered_parameters(optimizer)
            graphs = Backend(request.backend, dynamic, request.options.debug_log, registered, identity)
            layouts = layouts_of(optimizer)
            # Each part finds the parts before it in this list.
            features: List[Feature] = []
            for cls in classes():
                if cls.is_wanted(request):
                    features.append(cls(SetUpContext(request, features, undo, graphs, identity, layouts)))
            graphs.around_compile = overriding(features, "around_compile")
            placement = only(features, "placement") or Placement()
            # Register first: EngineState makes the reducer hook the parameters' nodes, before any hook of the caller.
            register_parameters(engine, reducer, placement, layouts)
            deepcompile = EngineState(engine, reducer, features, placement, layouts)
        _refuse_other_gathers(deepcompile.gather.runs(), group)
        if optimizer.bit16_groups_flat[0].is_cpu:
            agree_whether_to_hold(reducer, group)
        # From here on, the engine cannot train without DeepCompile: attach() frees memory and hooks that it needs.
        try:
            for carry in overriding(features, "carry"):
                carry(optimizer, reducer)
            with every_rank_raises("set the optimizer up", engine.seq_data_parallel_group):
                attach(optimizer, deepcompile)
            # Attached first: if the exchange fails, the optimizer refuses to step partitions of two orders.
            adopt(optimizer, layouts, deepcompile.transformed)
            for commit in overriding(features, "commit"):
                commit()
        except Exception as error:
            deepcompile.why_refused = f"engine.compile() failed half-way ({error}); create a new engine"
            raise
        deepcompile.undo, deepcompile.why_refused = undo.pop_all(), None
    # Large tensors are gone. A forward would fragment their memory, which the gradient partition and states need
    # whole.
    get_accelerator().empty_cache()
    return graphs


def _refuse_other_gathers(runs, group):
    """Raises ValueError on all ranks if one gathers parameters in another order, which no message would tell."""
    of_first = of_first_rank(runs, "gathers of all ranks", group)
    with every_rank_raises("set an engine up", group):
        if runs != of_first:
            raise ValueError(
                "this rank gathers parameters in another order than the first rank, because its blocks or the order "
                "of its modules differ; build the same model on every rank, with the same forwards, or set "
                "compile.overlap_param_gather to false"
            )


def make_reducer(request: Request, identity: int) -> Reducer:
    """Creates the native reducer of an engine, which knows no parameter yet."""
    engine, optimizer = request.engine, request.engine.optimizer
    return reducer_module().Reducer(
        identity=identity,
        bucket_numel=int(engine.zero_reduce_bucket_size()),
        send_numel=send_numel(dist.get_world_size(optimizer.dp_process_group)),
        overlap=overlaps_reduction(request),
        synchronize_before=request.options.sync_before_reduce,
        synchronize_after=request.options.sync_after_reduce,
        # Ranks gather sharded parameters while a backward runs, in another process group.
        hold_on_cpu=request.options.sharded is not None,
    )


def agree_whether_to_hold(reducer: Reducer, group: ProcessGroup) -> None:
    """Makes all reducers hold buckets on a CPU if a reducer of any rank asks for it.

    An engine that nobody destroyed asks until Python collects it, which each rank does at another time. A rank that
    holds a bucket may wait, in a backward, for ranks that wait for the bucket.
    """
    asks = torch.tensor([reducer.some_want_to_hold()], dtype=torch.int64)
    with collective("agree whether to hold gradients until a backward has run"):
        torch.distributed.all_reduce(asks, torch.distributed.ReduceOp.MAX, group)
    reducer.hold_on_cpu(bool(asks))


def register_parameters(
    engine: "DeepSpeedEngine", reducer: Reducer, placement: Placement, layouts: List[Layout]
) -> None:
    """Registers each parameter with a reducer, and the memory for its gradients. Allocates no device memory."""
    optimizer, places = engine.optimizer, {}
    # As the base divides: the ranks of one sequence compute parts of one loss, whose gradients add up.
    divisor = dist.get_world_size(optimizer.dp_process_group) / optimizer.sequence_parallel_size
    for group, (layout, process_group) in enumerate(zip(layouts, optimizer.real_dp_process_group, strict=True)):
        host = placement.gradients(optimizer, group, layout.partition_numel)
        reducer.add_group(
            process_group or dist.get_world_group(),
            divisor,
            layout.partition_numel,
            optimizer.gradient_accumulation_dtype,
            optimizer.bit16_groups_flat[group].device,
            # Whether the targets lie in one flat tensor. In the master weights' dtype they do: the step takes that
            # tensor for the gradient of the master weights, without a copy. Host memory is one tensor anyway.
            host is None
            and optimizer.gradient_accumulation_dtype == optimizer.single_partition_of_fp32_groups[group].dtype,
            host,
        )
        places.update({id(place.parameter): (group, place) for place in layout.places})
    for parameter in registered_parameters(optimizer):
        group, place = places[id(parameter)]
        name, dtype = engine.param_names[parameter], optimizer.get_param_comm_dtype(parameter)
        reducer.register_parameter(group, name, parameter, dtype, place.shard, place.offset)


def send_numel(ranks: int) -> int:
    """Returns the number of elements with which a bucket is sent, even if it could take more.

    Tens of megabytes keep NVLink busy long enough, and a bucket that is sent early is free early. But a reduction goes
    through all ranks one after the other, so each bucket also costs a latency that grows with the number of ranks.
    Buckets grow with that number too, so that fewer of them are sent. ``benchmarks/scale.py`` computes the cost.
    """
    return max(SEND_NUMEL, SEND_NUMEL_OF_A_RANK * ranks)


def _next_identity(optimizer):
    """Returns a number that no other engine of this process has and that is the same on every rank.

    Engines may share a process group, which matches messages by their order alone. Each rank's fingerprint begins with
    the number, so ranks find out if they have sent gradients of different engines.
    """
    global _last_identity
    identity = torch.tensor([_last_identity + 1], dtype=torch.int64, device=optimizer.bit16_groups_flat[0].device)
    with collective("give the engine its number"):
        dist.all_reduce(identity, op=dist.ReduceOp.MAX, group=optimizer.dp_process_group)
    _last_identity = int(identity)
    return _last_identity
