# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes engines compile themselves. DeepSpeed's engine calls these functions in lines that ``edits.py`` adds to it.

An engine with ZeRO-1 or ZeRO-2 whose configuration says ``compile.deepcompile`` compiles itself, so that no trainer
has to call ``engine.compile()``. All ranks must compile at the same time, so an engine compiles itself only in calls
that all ranks make.
"""

import inspect
from typing import TYPE_CHECKING, Any, Dict, List, Optional

import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.collectives import collective
from ...zero_1_and_2.engine.state import state_of
from ...zero_1_and_2.feature import Request
from ...zero_1_and_2.messages import log_info, log_notice, warn
from ...zero_1_and_2.own_thread import in_own_thread
from .initialize import is_set_up_by_compile

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def awaits_its_user(engine: "DeepSpeedEngine") -> bool:
    """Whether an engine with DeepCompile is not compiled because its user has not called ``engine.compile()``."""
    if not engine.is_deepcompile_enabled() or engine.is_deepcompile_active() or engine.is_compiled:
        return False
    # An engine without an optimizer, such as that of a reference model, does not train and needs no DeepCompile.
    return engine.optimizer is not None and not is_set_up_by_compile(engine)


def before_forward(engine: "DeepSpeedEngine") -> None:
    """Compiles an engine before its first training forward, which has gradients enabled.

    With sharded parameters all ranks make every forward together: then the first forward of any kind compiles the
    engine. Otherwise a forward in evaluation mode does not count as a training forward, because a rank may evaluate
    alone, even with gradients.

    Raises:
        ValueError: if DeepCompile cannot honour an option, as ``engine.compile()`` does.
    """
    if not engine.is_deepcompile_enabled() or engine.is_compiled:
        return
    _log_other_stages(engine)
    if not (torch.is_grad_enabled() or _compiles_before_any_forward(engine)):
        return
    # Disable compilation: a caller's torch.compile would trace this call, and the compiled module would become part of
    # the caller's graph. As a decorator, disable() would import torch._dynamo with DeepSpeed, which takes a second.
    torch.compiler.disable(in_own_thread)(_before_forward, engine, engine.module.training and torch.is_grad_enabled())


def _before_forward(engine, trains):
    if _is_left_to_caller(engine):
        return
    if trains or _compiles_before_any_forward(engine):
        if not _waits_on_any_rank(engine):
            _compile(engine, f"before its first {'training ' if trains else ''}forward")
        return
    if _waits(engine):
        return
    # This forward may be training in evaluation mode. The engine would then compile itself after the step, which is
    # too late for an error. deepspeed.initialize() has checked the options: check now for later changes.
    from ...zero_1_and_2.engine.options import refusal
    from .refused import refused_calls

    request = Request(engine, get_accelerator().get_compile_backend(), compile_kwargs={})
    error = refusal(request, refused_calls(request))
    if error is not None:
        raise error


def _compiles_before_any_forward(engine):
    # Parameters may still be on the host, where only a compiled engine finds them.
    return engine._config.compile_config.sharded is not None


def after_step(engine: "DeepSpeedEngine") -> None:
    """Called on all ranks after an optimizer step. Compiles an engine that no training forward has compiled.

    A forward does not compile the engine if the module was in evaluation mode, if the module was called without the
    engine, or if gradients were held before the forward. Warns once of a step in evaluation mode, by whomever and
    whenever the engine is compiled.
    """
    if not engine.module.training:
        _warn_of_evaluation_mode(engine)
    if engine.is_compiled or _is_left_to_caller(engine):
        return
    if not in_own_thread(_waits_on_any_rank, engine):
        _compile(engine, "after its first step")


def note_arguments(
    engine: "DeepSpeedEngine", backend: str, compile_kwargs: Optional[Dict[str, Any]], schedule: Optional[List]
) -> Dict[str, Any]:
    """Called when ``engine.compile()`` begins. Warns if the engine is already compiled with other arguments.

    Returns ``compile_kwargs`` as a new dict. By default all engines share one dict, and AutoSP and AutoTP write into
    it, which other engines would take for arguments of the user.

    Raises:
        ValueError: if ``compile_kwargs`` are no dict.
    """
    _log_other_stages(engine)
    if not isinstance(compile_kwargs, (dict, type(None))):
        raise ValueError(
            f"compile_kwargs={compile_kwargs!r} is not a dict of arguments of torch.compile; pass one, or leave it out"
        )
    compile_kwargs = dict(compile_kwargs or {})
    arguments = backend, dict(compile_kwargs), schedule
    if not engine.is_compiled:
        engine._compile_arguments = arguments
        return compile_kwargs
    default = inspect.signature(engine.compile).parameters["backend"].default
    asks = backend != default or compile_kwargs or schedule is not None
    if asks and arguments != engine._compile_arguments and state_of(engine) is not None:
        warn(
            "The arguments of engine.compile() have no effect, because the engine is compiled already, by itself or "
            "by an earlier call; call it before the first forward"
        )
    return compile_kwargs


def _log_other_stages(engine):
    """Logs once, for an engine of another stage, what the key ``deepcompile`` does there."""
    stage = engine.zero_optimization_stage()
    if stage in (1, 2) or not engine.is_deepcompile_enabled() or getattr(engine, "_has_logged_its_stage", False):
        return
    engine._has_logged_its_stage = True
    # An engine without an optimizer does not train, and an engine of AutoSP or AutoTP runs its own passes.
    if engine.optimizer is None or engine.uses_parallelization_pass_only():
        return
    does = (
        "is DeepSpeed's own DeepCompile, which begins when engine.compile() is called"
        if stage == 3
        else "leaves engine.compile() plain torch.compile; for DeepCompile set zero_optimization.stage to 1 or 2"
    )
    # A caller's torch.compile must not trace the logging.
    torch.compiler.disable(log_notice)(f"compile.deepcompile=true with ZeRO stage {stage} {does}")


def _warn_of_evaluation_mode(engine):
    if is_set_up_by_compile(engine) and not getattr(engine, "_has_warned_of_evaluation", False):
        engine._has_warned_of_evaluation = True
        warn("The model trains in evaluation mode, without dropout; if that is not meant, call engine.train() first")


def _is_left_to_caller(engine):
    # The caller may have called engine.compile(). If that call raised and the caller goes on, the caller has decided
    # to train without DeepCompile.
    return not is_set_up_by_compile(engine) or getattr(engine, "_compile_arguments", None) is not None


def _waits_on_any_rank(engine):
    """Whether any rank must compile later. All ranks call this, because they compile together."""
    waits = torch.tensor(_waits(engine), dtype=torch.uint8, device=engine.device)
    with collective("learn whether all ranks can compile the engine"):
        dist.all_reduce(waits, op=dist.ReduceOp.MAX, group=engine.seq_data_parallel_group)
    return bool(waits)


def _waits(engine):
    """Whether this rank must compile an engine later, if at all."""
    # Import here: the compiler takes a second, and training without DeepCompile does not need it.
    from .refused import has_gradients

    # Compiling would lose gradients that no step has used, so wait for a step. Do not compile if a later engine has
    # taken the parameters over.
    return has_gradients(engine) or not _holds_its_parameters(engine.optimizer)


def _holds_its_parameters(optimizer):
    """Whether an optimizer's parameters lie in its own flat tensors, and not in those of a later ZeRO-1/2 optimizer.

    True for an optimizer other than the ZeRO-1/2 optimizer.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return True
    return all(
        parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        for flat, group in zip(optimizer.bit16_groups_flat, optimizer.bit16_groups)
        for parameter in group[:1]
    )


def _compile(engine, when):
    backend = get_accelerator().get_compile_backend()
    log_info(f"DeepCompile compiles the engine with backend '{backend}' {when}, because compile.deepcompile is true")
    try:
        engine.compile(backend=backend)
    except BaseException:
        # The caller has not called engine.compile(), so the next training forward tries again and raises again.
        engine._compile_arguments = None
        raise
