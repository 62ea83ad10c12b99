# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an engine under DeepCompile ZeRO-1/2 does before and after each forward.

Without DeepCompile, DeepSpeed does a part of this in hooks of the module. With DeepCompile, DeepSpeed removes these
hooks, because the compiler would compile them with the module.
"""

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, Optional, Tuple

import torch

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from .gather_hooks import Waiting


def switch_off_flops_profiler(engine: "DeepSpeedEngine") -> Callable[[], None]:
    """Keeps the engine from starting the flops profiler on one rank. Returns a function that restores the option.

    The profiler replaces functions that the compiler traces.
    """
    config = engine._config.flops_profiler_config
    before, config.enabled = config.enabled, False

    def restore():
        config.enabled = before

    return restore


class AroundForward:
    """Makes the context of each forward of an engine.

    Args:
        engine: the engine.
        waiting: None, or the ``Waiting`` for parameters that are on their way.
    """

    def __init__(self, engine: "DeepSpeedEngine", waiting: Optional["Waiting"]):
        self._waiting = waiting
        self._acts = _acts_around_forward(engine)

    @contextlib.contextmanager
    def __call__(
        self, engine: "DeepSpeedEngine", inputs: Tuple, kwargs: Dict[str, Any]
    ) -> Iterator[Tuple[Tuple, Dict[str, Any]]]:
        """Yields the inputs and kwargs for the module's forward. If the forward raises, nothing runs after it."""
        zero12 = engine.optimizer._zero12
        zero12.reducer.follow_stream()
        if torch.is_grad_enabled():
            zero12.backward.forward_begins()
        if self._waiting is not None:
            # Parameters outside the blocks are complete before the forward starts; all parameters are complete when
            # the forward ends.
            self._waiting.forward_begins(engine.module.training)
        acts = self._acts and engine.is_deepcompile_active()
        if acts:
            for name in engine.engine_timers.forward_timers + engine.engine_timers.step_timers:
                # No forward or step is under way here, so a timer that runs belongs to a forward or step that raised.
                if engine.timers(name).started_:
                    engine.timers(name).reset()
            inputs, kwargs = engine._forward_prologue(inputs, kwargs) or (inputs, kwargs)
        yield inputs, kwargs
        if acts:
            engine._forward_epilogue()
        if self._waiting is not None:
            self._waiting.leave()


def _acts_around_forward(engine):
    """Whether an option makes the engine act before and after each forward: take times, cast the inputs.

    The report of the throughput alone does not count, because its timer would synchronize the device in every step.
    """
    return (
        engine.wall_clock_breakdown()
        or engine.memory_breakdown()
        or (engine.fp16_enabled() and engine.fp16_auto_cast())
    )
