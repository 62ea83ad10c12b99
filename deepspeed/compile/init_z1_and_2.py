# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Entry of DeepCompile for ZeRO-1 and ZeRO-2, called by ``engine.compile()``."""

import functools
import weakref

import torch

import deepspeed.comm as dist
from deepspeed.utils import logger

from . import regions
from .compilation_limit import CompilationLimit
from .flat_layout import registered_parameters
from .gradient_partition import attach, make_reducer, parameters_reduced_by_graphs, take_over_parameters
from .parameter_gather import Waiting
from .reduce_backend import make_backend
from .zero_options import acts_around_forward, check_options, overlaps_communication

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
    _drop_gradients_with_the_engine(engine)
    _act_around_forward(engine)
    registered = registered_parameters(engine.optimizer)
    reducible = parameters_reduced_by_graphs(engine.optimizer)
    if blocks:
        names = sorted({type(block).__name__ for block in blocks})
        logger.info(f"DeepCompile makes one graph for all {len(blocks)} blocks of each class of {names}")
        reducible = regions.reducible_in_all(blocks, reducible)
    else:
        logger.info(f"DeepCompile compiles the model as a whole, because {why}")
    waiting = _overlap_gather(engine, blocks) if blocks and compile_config.overlap_param_gather else None
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
    _compile_within_limit(engine, limit)
    return graphs


def _compile_within_limit(engine, limit):
    """Has the next ``module.compile()``, with which the engine's ``compile()`` ends, keep to ``limit``."""

    module = engine.module

    def compile_once(**kwargs):
        del vars(module)["compile"]
        limit.compile_module(module, **kwargs)

    # One that the user has put there is the user's business.
    if vars(module).setdefault("compile", compile_once) is compile_once:
        engine.optimizer.when_destroyed(functools.partial(_forget, module, compile_once))


def _forget(module, compile_once):
    if vars(module).get("compile") is compile_once:
        del vars(module)["compile"]


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


def _overlap_gather(engine, blocks):
    waiting = Waiting(engine.optimizer, engine.module, blocks)
    # Whatever the forward does: what it may read by itself is there before it, and all is behind it.
    for hook in (
        engine.register_forward_pre_hook(lambda *_: waiting.begin(), prepend=True),
        engine.register_forward_hook(lambda *_: waiting.leave()),
    ):
        engine.optimizer.when_destroyed(hook.remove)
    return waiting


def _drop_gradients_with_the_engine(engine):
    """Has ``engine.zero_grad()`` drop what was reduced too, which parameters no longer hold."""
    own = engine.zero_grad

    def zero_grad():
        own()
        engine.optimizer.zero_grad()

    engine.zero_grad = zero_grad
    engine.optimizer.when_destroyed(functools.partial(vars(engine).pop, "zero_grad", None))


def _act_around_forward(engine):
    """Notes that a forward begins and, where an option asks for it, does what hooks of the module do otherwise.

    DeepSpeed removes those hooks, because they would be compiled with the module. Hooks of the engine are not.
    """
    progress, reducer = engine.optimizer._progress, engine.optimizer._reducer

    def begin(*_):
        reducer.follow_stream()
        if torch.is_grad_enabled():
            progress.forward_begins()

    def before(engine, inputs, kwargs):
        for name in engine.engine_timers.forward_timers + engine.engine_timers.step_timers:
            # Neither a forward nor a step is under way here, but one may have raised.
            if engine.timers(name).started_:
                engine.timers(name).reset()
        return engine._forward_prologue(inputs, kwargs) if engine.is_deepcompile_active() else None

    def behind(engine, inputs, output):
        if engine.is_deepcompile_active():
            engine._forward_epilogue()

    hooks = [engine.register_forward_pre_hook(begin)]
    if acts_around_forward(engine):
        # The flops profiler would start there, on one rank: it replaces functions that the compiler looks at.
        engine._config.flops_profiler_config.enabled = False
        hooks.append(engine.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(engine.register_forward_hook(behind))
    for hook in hooks:
        engine.optimizer.when_destroyed(hook.remove)
