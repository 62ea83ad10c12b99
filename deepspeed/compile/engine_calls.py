# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the lines call that ``setup.py`` puts into DeepSpeed's engine.

An engine with ZeRO-1 or ZeRO-2 whose configuration says ``compile.deepcompile`` compiles itself, so that no trainer
has to call ``engine.compile()``. Compiling takes collectives, so an engine does it only where all ranks come by.
"""

import contextlib
import inspect
import logging

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist


def awaits_compile(engine) -> bool:
    """Whether an engine with DeepCompile is not compiled before its user calls ``engine.compile()``."""
    if not engine.is_deepcompile_enabled() or engine.is_deepcompile_active() or engine.is_compiled:
        return False
    # An engine without an optimizer, as that of a reference model, is not trained, and there is nothing to compile.
    return engine.optimizer is not None and not _compiles_itself(engine)


def around_forward(engine, inputs, kwargs):
    """Returns a context of the module's forward within the engine's, whose target is its (inputs, kwargs).

    Compiles an engine before its first training forward. A rank may evaluate alone, also with gradients, so a forward
    in evaluation mode does not count as one.

    Raises:
        ValueError: naming an option that DeepCompile cannot honour, as ``engine.compile()`` does.
    """
    if torch.is_grad_enabled() and engine.module.training:
        _compile_if_due(engine, "before its first training forward")
    around = getattr(engine.optimizer, "_around_forward", None)
    return contextlib.nullcontext((inputs, kwargs)) if around is None else around(engine, inputs, kwargs)


def after_step(engine) -> None:
    """Called on all ranks behind an optimizer step. Compiles an engine that has trained without a training forward.

    Its module is trained in evaluation mode, or was called by itself, or held gradients when the engine was called.
    """
    _compile_if_due(engine, "behind its first step")
    around = getattr(engine.optimizer, "_around_forward", None)
    if around is not None and not engine.module.training:
        around.trains_in_evaluation_mode = True


def compile_module(engine, **compile_kwargs) -> None:
    """Does what ``engine.module.compile(**compile_kwargs)`` does, in ZeRO-1/2 within DeepCompile's own limit."""
    if engine.is_deepcompile_active() and _is_attached(engine):
        engine.optimizer._limit.compile_module(engine.module, **compile_kwargs)
    else:
        engine.module.compile(**compile_kwargs)


def warn_if_too_late(engine, backend, compile_kwargs, schedule) -> None:
    """Called when ``engine.compile()`` finds the engine compiled: what it asks for in its arguments has no effect."""
    default = inspect.signature(engine.compile).parameters["backend"].default
    if (backend != default or compile_kwargs or schedule is not None) and _is_attached(engine):
        log_dist(
            "The arguments of engine.compile() have no effect, because the engine is compiled already, by itself or "
            "by an earlier call; call it before the first forward",
            ranks=[0],
            level=logging.WARNING,
        )


def drop_gradients(engine) -> None:
    """Has ``engine.zero_grad()`` drop what was reduced too, which parameters no longer hold."""
    if _is_attached(engine):
        engine.optimizer.zero_grad()


def _is_attached(engine):
    if not engine.is_deepcompile_enabled():
        return False
    # Not above: whoever trains without DeepCompile shall not wait for it to be imported.
    from .gradient_partition import StepLocalGradients

    return isinstance(engine.optimizer, StepLocalGradients)


def _compiles_itself(engine):
    return (
        engine.is_deepcompile_enabled()
        and engine.optimizer is not None
        and engine.zero_optimization_stage() in (1, 2)
        # The passes of AutoSP and AutoTP want inputs that their users prepare.
        and not engine.uses_parallelization_pass_only()
    )


def _compile_if_due(engine, when):
    # A caller whose engine.compile() raised, and who goes on, has decided to train without DeepCompile.
    if engine.is_compiled or not _compiles_itself(engine) or getattr(engine, "_was_asked_to_compile", False):
        return
    from .zero_options import has_gradients

    # They would be lost; they are gone behind the step.
    if has_gradients(engine):
        return
    backend = get_accelerator().get_compile_backend()
    log_dist(
        f"DeepCompile compiles the engine with backend '{backend}' {when}, because compile.deepcompile is true",
        ranks=[0],
        level=logging.INFO,
    )
    try:
        engine.compile(backend=backend)
    except BaseException:
        engine._was_asked_to_compile = False
        raise
