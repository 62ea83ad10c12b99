# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Sets an engine up for DeepCompile ZeRO-1/2, and undoes the setup when the engine is destroyed."""

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

import torch
from torch.nn import Module

import deepspeed.comm as dist
from deepspeed.utils import logger

from . import eight_bit_states
from .collectives import collective
from .feature import Asked, Feature, Making, classes
from .gather_hooks import Waiting
from .graph import compile_blocks
from .graph.backend import Backend
from .graph.choose_blocks import called_by
from .graph.compilation_limit import CompilationLimit
from .key_value_cache import train_without_cache
from .layout import flat_layout, registered_parameters
from .messages import warn
from .native import Reducer, reducer_module
from .offload import memory_for_gradients
from .optimizer import attach, take_over_parameters
from .options import Plan, make_plan
from .sharded_blocks import ShardedBlocks
from .state import Zero12
from .update import make_rules
from .update.muon import BATCH_NUMEL, Orthogonalizer, matrices_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

_last_identity = 0
_groups_of_shards: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# With how many elements a bucket is sent; see send_numel().
SEND_NUMEL = 2**25
SEND_NUMEL_OF_A_RANK = 2**20


# The caller may compile the engine for a forward in inference mode, and memory made there cannot train.
@torch.inference_mode(False)
def set_up(
    engine: "DeepSpeedEngine", backend: str, compile_kwargs: Dict[str, Any], schedule: Optional[List]
) -> Callable:
    """Prepares an engine and returns the backend with which its module is to be compiled.

    Each step that changes how the engine or its module runs adds a function to ``undo`` that reverts the change. If a
    later step raises, these functions run at once, and the engine trains as it did before; otherwise they run at the
    engine's end. An earlier ``compile()`` of a part of the module is not restored.

    Args:
        engine: a DeepSpeedEngine of ZeRO stage 1 or 2.
        backend: "inductor" or "eager".
        compile_kwargs: what ``engine.compile()`` passes on to ``module.compile()``.
        schedule: None, or the default schedule, which runs this stage's own pass at step 0.

    Raises:
        ValueError: if ZeRO-1/2 under DeepCompile cannot honour an option. The message names the option and says what
            to do. The engine is then unchanged. Also if another engine, which trains other parameters, has compiled
            blocks of the model: earlier engines of this engine's own parameters have given way by then.
    """
    plan = make_plan(engine, backend, compile_kwargs, schedule)
    optimizer, module = engine.optimizer, engine.module
    shorten_timeouts(optimizer)
    take_over_parameters(optimizer)
    compile_blocks.refuse_blocks_of_others(module)

    with contextlib.ExitStack() as undo:
        reducer = make_reducer(engine, plan)
        undo.callback(reducer.close)
        undo.callback(_note_end, weakref.ref(engine))
        compile_blocks.take_over_compiled(each for each in module.modules() if each is not module)
        train_without_cache(module, undo)
        waiting = None
        if plan.overlaps_gather:
            waiting = Waiting(optimizer, module, plan.blocks)
            undo.callback(waiting.remove_hooks)
        sharded = None
        if plan.shards_frozen:
            sharded = make_sharded_blocks(optimizer, module, plan.blocks, undo)
        # The profiler, which one rank starts, replaces functions that the compiler traces.
        profiler = engine._config.flops_profiler_config
        undo.callback(setattr, profiler, "enabled", profiler.enabled)
        profiler.enabled = False
        limit = CompilationLimit(module, plan.compilations, raises=plan.fullgraph)
        graphs = Backend(plan, registered_parameters(optimizer), reducer.identity, limit, waiting)
        features = make_features(Making(Asked(engine, backend, compile_kwargs), [], plan.blocks, undo, graphs))
        graphs.use(features)
        if plan.blocks:
            names = sorted({type(block).__name__ for block in plan.blocks})
            logger.info(f"DeepCompile makes one graph for all {len(plan.blocks)} blocks of each class of {names}")
            compile_blocks.compile_blocks(module, plan.blocks, graphs, compile_kwargs, limit, undo, waiting, sharded)
        else:
            logger.info(f"DeepCompile compiles the model as a whole, because {plan.why_whole}")
        batch_numel = min(BATCH_NUMEL, int(engine.zero_reduce_bucket_size()) // 2)
        zero12 = Zero12(
            engine,
            reducer=reducer,
            limit=limit,
            waiting=waiting,
            sharded=sharded,
            rules=make_rules(plan.backend == "inductor" and plan.compiles, plan.optimizer_states),
            orthogonalizer=Orthogonalizer(matrices_of(optimizer), batch_numel),
            optimizer_states=plan.optimizer_states,
            features=features,
        )
        # It refuses loaded states of another form, so it comes before anything is given up.
        eight_bit_states.adopt(optimizer, plan.optimizer_states is not None)
        if sharded is not None:
            sharded.shard()
        # Last, because it gives up memory and hooks with which the engine trains without DeepCompile.
        attach(optimizer, zero12)
        zero12.undo = undo.pop_all()
    return graphs


def make_features(making: Making) -> List[Feature]:
    """Makes the optional parts of an engine, each of which finds those before it in ``making``."""
    for cls in classes():
        if cls.is_wanted(making.asked):
            making.features.append(cls(making))
    return making.features


def shorten_timeouts(optimizer: "DeepSpeedZeroOptimizer") -> None:
    """Shortens the timeout of the optimizer's process groups to the timeout of the world's process group.

    DeepSpeed makes these groups with torch's default timeout, which is half an hour with gloo, and ignores the timeout
    given to ``init_distributed()``. A timeout that is already shorter stays as it is.
    """
    for group in {optimizer.dp_process_group, *optimizer.real_dp_process_group} - {None}:
        _shorten_timeout(group, optimizer.bit16_groups_flat[0].device)


def _shorten_timeout(group, device):
    world, backend = (_communicating_backend(each, device) for each in (dist.get_world_group(), group))
    if {world.name(), backend.name()} <= {"gloo", "nccl"} and world.options._timeout < backend.options._timeout:
        backend.set_timeout(world.options._timeout)


def _communicating_backend(group, device):
    """Returns the backend that sends a process group's tensors on ``device``."""
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend, and torch 2.11's wrapper cannot set a timeout.
    return getattr(backend, "wrapped_pg", backend)


def make_sharded_blocks(
    optimizer: "DeepSpeedZeroOptimizer", module: Module, blocks: List[Module], undo: contextlib.ExitStack
) -> ShardedBlocks:
    """Makes what shards the frozen parameters of blocks, with a process group of its own. Nothing is sharded yet."""
    group, device = _group_of_shards(optimizer.dp_process_group), optimizer.bit16_groups_flat[0].device
    _shorten_timeout(group, device)
    trained = registered_parameters(optimizer)
    sharded = ShardedBlocks(module, blocks, called_by(module, blocks), trained, group, device)
    undo.callback(sharded.close)
    if not sharded.units:
        warn("compile.shard_frozen=True has no effect, because no block has frozen parameters of its own")
    return sharded


def _group_of_shards(group):
    """Returns the process group for sharded parameters of the ranks of ``group``. All engines of these have the same.

    Engines come and go, but a communicator takes memory and time.
    """
    if group not in _groups_of_shards:
        ranks = dist.get_all_ranks_from_group(group)
        # If ``group`` has not all ranks, the others are not here.
        is_part = len(ranks) < dist.get_world_size()
        _groups_of_shards[group] = torch.distributed.new_group(ranks, use_local_synchronization=is_part)
    return _groups_of_shards[group]


def make_reducer(engine: "DeepSpeedEngine", plan: Plan) -> Reducer:
    """Creates the native reducer of an engine and registers every parameter. No gradient memory is allocated."""
    optimizer = engine.optimizer
    reducer = reducer_module().Reducer(
        identity=_next_identity(optimizer),
        bucket_numel=int(engine.zero_reduce_bucket_size()),
        send_numel=send_numel(dist.get_world_size(optimizer.dp_process_group)),
        overlap=plan.overlaps_reduction,
        synchronize_before=plan.synchronize_before,
        synchronize_after=plan.synchronize_after,
    )
    places = {}
    for group, process_group in enumerate(optimizer.real_dp_process_group):
        host = memory_for_gradients(optimizer, group)
        reducer.add_group(
            process_group or dist.get_world_group(),
            int(optimizer.partition_size[group]),
            optimizer.gradient_accumulation_dtype,
            optimizer.bit16_groups_flat[group].device,
            # Whether the targets lie in one flat tensor. In the master weights' dtype they do: the step takes that
            # tensor for the gradient of the master weights, without a copy. Host memory is one tensor anyway.
            host is None
            and optimizer.gradient_accumulation_dtype == optimizer.single_partition_of_fp32_groups[group].dtype,
            host,
        )
        places.update({id(parameter): (group, offset) for parameter, offset in flat_layout(optimizer, group)})
    for parameter in registered_parameters(optimizer):
        group, offset = places[id(parameter)]
        name, dtype = engine.param_names[parameter], optimizer.get_param_comm_dtype(parameter)
        reducer.register_parameter(group, name, parameter, dtype, offset)
    return reducer


def send_numel(ranks: int) -> int:
    """Returns the number of elements with which a bucket is sent, even if more may be pending.

    Tens of megabytes keep NVLink busy long enough, and a bucket that is sent early is free early. But a reduction goes
    through all ranks one after the other, so each bucket also costs a latency that grows with the number of ranks.
    Buckets grow with that number too, so that fewer of them are sent. ``docs/scale.md`` has the reckoning.
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


def _note_end(reference):
    engine = reference()
    if engine is not None:
        # If this flag stayed set, DeepSpeed's destroy() would give the module the hooks of an engine without
        # DeepCompile.
        engine._deepcompile_active = False
