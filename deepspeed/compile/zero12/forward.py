# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What happens around each forward of an engine under DeepCompile ZeRO-1/2.

DeepSpeed does some of it in hooks of the module, which it removes, because they would be compiled with the module.
"""

import contextlib

import torch


class AroundForward:
    """A context for each forward.

    Args:
        engine: whose forwards these are; its optimizer is attached already.
        waiting: None, or the ``Waiting`` for parameters that are on their way.
    """

    def __init__(self, engine, waiting):
        self._waiting = waiting
        self._acts = _acts_around_forward(engine)
        if self._acts:
            # DeepSpeed would start the flops profiler around the forward, on one rank. The profiler replaces functions
            # at which the compiler looks.
            engine._config.flops_profiler_config.enabled = False

    @contextlib.contextmanager
    def __call__(self, engine, inputs, kwargs):
        """Yields the inputs and kwargs for the module's forward. Where that raises, nothing is done behind it."""
        zero12 = engine.optimizer._zero12
        zero12.reducer.follow_stream()
        if torch.is_grad_enabled():
            zero12.backward.forward_begins()
        if self._waiting is not None:
            # Parameters outside the blocks are complete before the forward starts; all parameters are when it ends.
            self._waiting.begin()
        acts = self._acts and engine.is_deepcompile_active()
        if acts:
            for name in engine.engine_timers.forward_timers + engine.engine_timers.step_timers:
                # Neither a forward nor a step is under way here, but one may have raised.
                if engine.timers(name).started_:
                    engine.timers(name).reset()
            inputs, kwargs = engine._forward_prologue(inputs, kwargs) or (inputs, kwargs)
        yield inputs, kwargs
        if acts:
            engine._forward_epilogue()
        if self._waiting is not None:
            self._waiting.leave()


def _acts_around_forward(engine):
    """Whether an option makes the engine do something before and after each forward: take times, cast the inputs.

    Reporting the throughput alone does not count, since that timer synchronizes the device in every step.
    """
    return (
        engine.wall_clock_breakdown()
        or engine.memory_breakdown()
        or (engine.fp16_enabled() and engine.fp16_auto_cast())
    )
