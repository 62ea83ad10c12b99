# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Entry of DeepCompile for ZeRO-1 and ZeRO-2, called by ``engine.compile()``."""

import functools
import weakref

import torch

import deepspeed.comm as dist
from deepspeed.utils import logger

from . import regions
from .around_forward import AroundForward
from .compilation_limit import CompilationLimit
from .flat_layout import registered_parameters
from .gradient_partition import attach, make_reducer, parameters_reduced_by_graphs, take_over_parameters
from .key_value_cache import train_without_cache
from .parameter_gather import Waiting
from .reduce_backend import make_backend
from .zero_options import check_options, overlaps_communication

# How a module was called before each of the engines that were made for it, in order: module -> [_Compilation].
_compilations = weakref.WeakKeyDictionary()


def init_z1_and_2(engine, backend, compile_config, compile_kwargs, schedule=None, use_z2=False):
    """Prepares an engine and returns the backend with which its module is to be compiled.

    Args:
        engine: a DeepSpeedEngine with ZeRO stage 1 or 2.
        backend: "inductor" or "eager".
        compile_config: the ``compile`` section of ``ds_config``.
        compile_kwargs: what ``engine.compile()`` passes on to ``module.compile()``.
        schedule: None, or this stage's own pass at step 0, which is the default.
        use_z2: whether the stage is 2.

    Raises:
        ValueError: naming an option that ZeRO-1/2 under DeepCompile cannot honour, and what to do. The engine is
            then unchanged.
    """
    check_options(engine, backend, compile_config, compile_kwargs, schedule, use_z2)
    _keep_timeout_of_world(engine.optimizer)
    take_over_parameters(engine.optimizer)
    regions.refuse_blocks_of_others(engine.module)
    blocks, why = regions.choose_blocks(engine.module, compile_config.regional_compilation, compile_kwargs)
    reducer = make_reducer(
        engine,
        overlap=overlaps_communication(engine, compile_config),
        synchronize_before=compile_config.sync_before_reduce,
        synchronize_after=compile_config.sync_after_reduce,
    )
    # All blocks of a class share a limit, so each of them may differ.
    count = compile_kwargs.get("recompile_limit") or torch._dynamo.config.recompile_limit * max(len(blocks), 1)
    limit = CompilationLimit(count, reducer, raises=bool(compile_kwargs.get("fullgraph")))
    attach(engine.optimizer, engine, reducer, limit)
    _undo_compilation_when_destroyed(engine)
    # Those that another engine has compiled are its own.
    parts = [each for each in engine.module.modules() if each is not engine.module and not _compilations.get(each)]
    regions.take_over_compiled(parts)
    engine.optimizer.when_destroyed(train_without_cache(engine.module))
    registered = registered_parameters(engine.optimizer)
    reducible = parameters_reduced_by_graphs(engine.optimizer)
    if blocks:
        names = sorted({type(block).__name__ for block in blocks})
        logger.info(f"DeepCompile makes one graph for all {len(blocks)} blocks of each class of {names}")
        reducible = regions.reducible_in_all(blocks, reducible)
    else:
        logger.info(f"DeepCompile compiles the model as a whole, because {why}")
    overlaps = blocks and compile_config.overlap_param_gather
    waiting = Waiting(engine.optimizer, engine.module, blocks) if overlaps else None
    engine.optimizer._around_forward = AroundForward(engine, waiting)
    graphs = make_backend(
        backend,
        reducible,
        registered,
        reducer.identity,
        limit,
        compile_config.debug_log,
        waiting,
        compile_kwargs.get("dynamic"),
    )
    if blocks:
        graphs = functools.partial(graphs, has_blocks=True)
        of_blocks = functools.partial(graphs, in_block=True)
        changed = regions.compile_regions(engine.module, blocks, of_blocks, compile_kwargs, limit, waiting)
        engine.optimizer.when_destroyed(functools.partial(regions.restore, changed))
    return graphs


def _keep_timeout_of_world(optimizer):
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


class _Compilation:
    def __init__(self, before):
        self.before = before


def _undo_compilation_when_destroyed(engine):
    """Has the module as it was before, once the engine is destroyed: neither compiled nor with the engine's hooks."""
    module, compilation = engine.module, _Compilation(engine.module._compiled_call_impl)
    reference = weakref.ref(engine)
    _compilations.setdefault(module, []).append(compilation)

    def undo():
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

    engine.optimizer.when_destroyed(undo)
