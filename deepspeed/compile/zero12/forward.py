# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an engine does before and after each forward.

Without DeepCompile, DeepSpeed does a part of this in hooks of the module. With DeepCompile, DeepSpeed removes these
hooks, because the compiler would compile them with the module.
"""

import contextlib
from typing import TYPE_CHECKING, Any, ContextManager, Dict, Tuple

import torch

from .self_compile import compile_before_forward
from .state import state_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def around_forward(
    engine: "DeepSpeedEngine", inputs: Tuple, kwargs: Dict[str, Any]
) -> ContextManager[Tuple[Tuple, Dict[str, Any]]]:
    """Returns the context in which an engine calls its module. The context yields (inputs, kwargs) for that call.

    Before its first training forward, an engine with DeepCompile compiles itself here.

    Raises:
        ValueError: if DeepCompile cannot honour an option, as ``engine.compile()`` does.
    """
    if engine.is_deepcompile_enabled() and not engine.is_compiled:
        if torch.is_grad_enabled() or engine._config.compile_config.compiles_before_any_forward():
            compile_before_forward(engine)
    zero12 = state_of(engine)
    if zero12 is None:
        return contextlib.nullcontext((inputs, kwargs))
    return _around_forward(engine, zero12, inputs, kwargs)


@contextlib.contextmanager
def _around_forward(engine, zero12, inputs, kwargs):
    """If the forward raises, nothing runs after it."""
    zero12.reducer.follow_stream()
    if torch.is_grad_enabled():
        zero12.backward.forward_begins()
    with contextlib.ExitStack() as stack:
        for around in zero12.around_forward:
            stack.enter_context(around(engine.module.training))
        acts = _acts_around_forward(engine) and engine.is_deepcompile_active()
        if acts:
            for name in engine.engine_timers.forward_timers + engine.engine_timers.step_timers:
                # No forward or step is under way here, so a timer that runs belongs to a forward or step that raised.
                if engine.timers(name).started_:
                    engine.timers(name).reset()
            inputs, kwargs = engine._forward_prologue(inputs, kwargs) or (inputs, kwargs)
        yield inputs, kwargs
        if acts:
            engine._forward_epilogue()


def _acts_around_forward(engine):
    """Whether an option makes the engine act before and after each forward: take times, cast the inputs.

    The report of the throughput alone does not count, because its timer would synchronize the device in every step.
    """
    return (
        engine.wall_clock_breakdown()
        or engine.memory_breakdown()
        or (engine.fp16_enabled() and engine.fp16_auto_cast())
    )
