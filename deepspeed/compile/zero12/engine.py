# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How an engine is set up for DeepCompile ZeRO-1/2, and what its end undoes."""

import functools
import weakref
from typing import Callable, List

import torch
from torch.nn import Parameter

import deepspeed.comm as dist
from deepspeed.utils import logger

from .collectives import collective
from .forward import AroundForward
from .gather_hooks import Waiting
from .graph import compile_blocks
from .graph.backend import make_backend
from .graph.compilation_limit import CompilationLimit
from .key_value_cache import train_without_cache
from .layout import flat_layout, registered_parameters
from .native import reducer_module
from .optimizer import attach, has_hooks, take_over_parameters
from .options import Plan, make_plan

# How a module was called before each of the engines that were made for it, in order: module -> [_Compilation].
_compilations = weakref.WeakKeyDictionary()
_last_identity = 0


def compile_engine(engine, backend, compile_config, compile_kwargs, schedule, stage: int) -> Callable:
    """Prepares an engine and returns the backend with which its module is to be compiled.

    Each step from ``attach()`` on that changes the engine or its module leaves on ``undo`` what takes it back.

    Args:
        engine: a DeepSpeedEngine with this ZeRO stage.
        backend: "inductor" or "eager".
        compile_config: the ``compile`` section of ``ds_config``.
        compile_kwargs: what ``engine.compile()`` passes on to ``module.compile()``.
        schedule: None, or this stage's own pass at step 0, which is the default.
        stage: 1 or 2.

    Raises:
        ValueError: naming an option that ZeRO-1/2 under DeepCompile cannot honour, and what to do. The engine is
            then unchanged.
    """
    plan = make_plan(engine, backend, compile_config, compile_kwargs, schedule, stage)
    optimizer, module = engine.optimizer, engine.module
    keep_timeout_of_world(optimizer)
    take_over_parameters(optimizer)
    compile_blocks.refuse_blocks_of_others(module)

    reducer = make_reducer(engine, plan)
    limit = CompilationLimit(plan.compilations, reducer, raises=plan.fullgraph)
    zero12 = attach(engine, reducer, limit)
    undo = zero12.undo.callback
    undo(restore_call(engine))
    # What another engine has compiled is that engine's own.
    parts = [each for each in module.modules() if each is not module and not _compilations.get(each)]
    compile_blocks.take_over_compiled(parts)
    undo(train_without_cache(module))
    waiting = Waiting(optimizer, module, plan.blocks) if plan.overlaps_gather else None
    zero12.around_forward = AroundForward(engine, waiting)

    reducible = parameters_reduced_by_graphs(optimizer)
    if not plan.blocks:
        logger.info(f"DeepCompile compiles the model as a whole, because {plan.why_whole}")
        return make_backend(plan, reducible, zero12.registered, reducer.identity, limit, waiting)
    names = sorted({type(block).__name__ for block in plan.blocks})
    logger.info(f"DeepCompile makes one graph for all {len(plan.blocks)} blocks of each class of {names}")
    reducible = compile_blocks.reducible_in_all(plan.blocks, reducible)
    graphs = make_backend(plan, reducible, zero12.registered, reducer.identity, limit, waiting)
    of_blocks = functools.partial(graphs, in_block=True)
    changed = compile_blocks.compile_blocks(module, plan.blocks, of_blocks, compile_kwargs, limit, waiting)
    undo(compile_blocks.restore, changed)
    return graphs


def keep_timeout_of_world(optimizer) -> None:
    """Has the optimizer's process groups give up on another rank when the world's would, if that is sooner.

    DeepSpeed makes them with torch's default, half an hour with gloo, whatever ``init_distributed()`` was given.
    """
    device = optimizer.bit16_groups_flat[0].device
    world = _communicating_backend(dist.get_world_group(), device)
    for group in {optimizer.dp_process_group, *optimizer.real_dp_process_group} - {None}:
        backend = _communicating_backend(group, device)
        if not {world.name(), backend.name()} <= {"gloo", "nccl"}:
            continue
        if world.options._timeout < backend.options._timeout:
            backend.set_timeout(world.options._timeout)


def _communicating_backend(group, device):
    """Returns the backend that sends a process group's tensors on ``device``."""
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend, and torch 2.11's wrapper cannot set a timeout.
    return getattr(backend, "wrapped_pg", backend)


def make_reducer(engine, plan: Plan):
    """Creates the native reducer of an engine, with every parameter registered empty."""
    optimizer = engine.optimizer
    reducer = reducer_module().Reducer(
        identity=_next_identity(optimizer),
        bucket_numel=int(engine.zero_reduce_bucket_size()),
        overlap=plan.overlaps_reduction,
        synchronize_before=plan.synchronize_before,
        synchronize_after=plan.synchronize_after,
    )
    for group, process_group in enumerate(optimizer.real_dp_process_group):
        reducer.add_group(
            process_group or dist.get_world_group(),
            int(optimizer.partition_size[group]),
            optimizer.gradient_accumulation_dtype,
            optimizer.bit16_groups_flat[group].device,
            # The step needs a copy in the dtype of the master weights. Where the targets have that dtype, they are the
            # copy, and must lie in one flat tensor.
            optimizer.gradient_accumulation_dtype == optimizer.single_partition_of_fp32_groups[group].dtype,
        )
        for parameter, offset in flat_layout(optimizer, group):
            reducer.register_parameter(
                group, engine.param_names[parameter], parameter, optimizer.get_param_comm_dtype(parameter), offset
            )
    return reducer


def _next_identity(optimizer):
    """Returns a number that no other engine of this process has and that is the same on every rank.

    Engines may share a process group, which matches messages by their order alone.
    """
    global _last_identity
    identity = torch.tensor([_last_identity + 1], dtype=torch.int64, device=optimizer.bit16_groups_flat[0].device)
    with collective("give the engine its number"):
        dist.all_reduce(identity, op=dist.ReduceOp.MAX, group=optimizer.dp_process_group)
    _last_identity = int(identity)
    return _last_identity


def parameters_reduced_by_graphs(optimizer) -> List[Parameter]:
    """Lists the parameters whose gradients compiled graphs may reduce: those without a hook on any rank.

    A hook changes which graphs reduce what, and all ranks must reduce in one order.
    """
    registered = registered_parameters(optimizer)
    hooked = torch.tensor([has_hooks(parameter) for parameter in registered], dtype=torch.int32)
    hooked = hooked.to(optimizer.bit16_groups_flat[0].device)
    with collective("find out which parameters have hooks"):
        dist.all_reduce(hooked, op=dist.ReduceOp.MAX, group=optimizer.dp_process_group)
    return [parameter for parameter, flag in zip(registered, hooked.tolist(), strict=True) if not flag]


class _Compilation:
    def __init__(self, before):
        self.before = before


def restore_call(engine) -> Callable[[], None]:
    """Returns a function that has the engine's module called as it is called now, once the engine is destroyed."""
    module, compilation = engine.module, _Compilation(engine.module._compiled_call_impl)
    reference = weakref.ref(engine)
    _compilations.setdefault(module, []).append(compilation)

    def restore():
        engines = _compilations[module]
        index = engines.index(compilation)
        if compilation is engines[-1]:
            module._compiled_call_impl = compilation.before
        else:
            # A later engine has compiled the module since; what it leaves must not be this one's.
            engines[index + 1].before = compilation.before
        del engines[index]
        destroyed = reference()
        if destroyed is not None:
            # While this is set, DeepSpeed ends by giving the module the hooks of an engine without DeepCompile.
            destroyed._deepcompile_active = False

    return restore
