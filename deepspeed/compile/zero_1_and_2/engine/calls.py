# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The functions that DeepSpeed's engine calls, in lines that ``setup.py`` adds to it.

Optional parts have lines and functions of their own.
"""

import contextlib
import logging
from typing import TYPE_CHECKING, Any, ContextManager, Dict, Tuple

import torch

from deepspeed.utils import logger

from ..gradient.native import reducer_module
from .state import state_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def around_forward(
    engine: "DeepSpeedEngine", inputs: Tuple, kwargs: Dict[str, Any]
) -> ContextManager[Tuple[Tuple, Dict[str, Any]]]:
    """Returns the context in which an engine calls its module. The context yields (inputs, kwargs) for that call.

    Without DeepCompile, DeepSpeed does a part of this in hooks of the module. With DeepCompile, DeepSpeed removes
    these hooks, because the compiler would compile them with the module.
    """
    deepcompile = state_of(engine)
    if deepcompile is None:
        return contextlib.nullcontext((inputs, kwargs))
    return _around_forward(engine, deepcompile, inputs, kwargs)


@contextlib.contextmanager
def _around_forward(engine, deepcompile, inputs, kwargs):
    """If the forward raises, nothing runs after it."""
    deepcompile.reducer.follow_stream()
    if torch.is_grad_enabled():
        deepcompile.backward.forward_begins()
    # Whether DeepSpeed's prologue takes times or casts inputs. The throughput counts only if its report is shown,
    # because its timer synchronizes the device in every micro-batch.
    acts = engine.is_deepcompile_active() and (
        engine.wall_clock_breakdown()
        or engine.memory_breakdown()
        or (engine.steps_per_print() is not None and logger.isEnabledFor(logging.INFO))
        or (engine.fp16_enabled() and engine.fp16_auto_cast())
    )
    if acts:
        for name in engine.engine_timers.forward_timers + engine.engine_timers.step_timers:
            # No forward or step is under way here, so a timer that runs belongs to a forward or step that raised.
            if engine.timers(name).started_:
                engine.timers(name).reset()
        inputs, kwargs = engine._forward_prologue(inputs, kwargs) or (inputs, kwargs)
    yield inputs, kwargs
    if acts:
        engine._forward_epilogue()


def is_own_backward(engine: "DeepSpeedEngine") -> bool:
    """Called when a backward comes to an output of an engine. Returns whether it is a backward of this engine.

    A backward within ``engine.backward()`` is one, because all ranks call that function. Any other backward only
    passes through the engine unless its caller wants gradients of the engine's parameters: for example the backward of
    a generator through a frozen critic, or ``torch.autograd.grad()`` of inputs.

    Raises:
        RuntimeError: if the backward asks compiled code for second derivatives.
    """
    deepcompile = state_of(engine)
    if deepcompile is None:
        return True
    if torch.is_grad_enabled() and reducer_module().leads_to_compiled_code():
        raise RuntimeError(
            "create_graph=True asks for second derivatives, and code that DeepCompile has compiled has none; run this "
            "forward and its backward in `with torch.compiler.set_stance('force_eager'):`"
        )
    return engine._running_engine_backward or deepcompile.reducer.leads_to_parameters()


def announce_backward(engine: "DeepSpeedEngine") -> None:
    """Called when a backward comes to an output of an engine, for each output. Announces the backward to the engine.

    DeepSpeed itself announces the first backward through the outputs of a forward only.
    """
    deepcompile = state_of(engine)
    if deepcompile is not None and not deepcompile.reducer.in_backward:
        engine._backward_prologue()


def settle_if_abandoned(engine: "DeepSpeedEngine") -> None:
    """Settles an abandoned backward before DeepSpeed says whether a micro-batch is the last of its step.

    A backward that raised restarts the count of micro-batches.
    """
    deepcompile = state_of(engine)
    if deepcompile is not None:
        deepcompile.backward.settle()


def drop_gradients(engine: "DeepSpeedEngine") -> None:
    """Called by ``engine.zero_grad()``: drops reduced gradients too, which parameters no longer hold."""
    if state_of(engine) is not None:
        engine.optimizer.zero_grad()


def after_step(engine: "DeepSpeedEngine") -> None:
    """Called on all ranks after an optimizer step."""
    deepcompile = state_of(engine)
    if deepcompile is not None:
        for call in deepcompile.after_step:
            call(engine)


def compile_module(engine: "DeepSpeedEngine", **compile_kwargs: Any) -> None:
    """Compiles the module as ``engine.module.compile(**compile_kwargs)`` does.

    Under ZeRO-1/2, the engine's end undoes this. Does nothing if an optional part has compiled modules already.
    """
    module, deepcompile = engine.module, state_of(engine)
    if engine.is_deepcompile_active() and deepcompile is not None:
        if compile_kwargs["backend"].compiled_modules:
            return
        deepcompile.undo.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
    module.compile(**compile_kwargs)
