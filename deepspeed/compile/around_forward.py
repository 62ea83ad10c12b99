# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What happens around each forward of an engine under DeepCompile ZeRO-1/2.

DeepSpeed does some of it in hooks of the module, which it removes, because they would be compiled with the module.
"""

import contextlib

import torch

from .zero_options import acts_around_forward


class AroundForward:
    """A context for each forward.

    Args:
        engine: whose forwards these are; its optimizer is attached already.
        waiting: None, or the ``Waiting`` for parameters that are on their way.
    """

    def __init__(self, engine, waiting):
        self._waiting = waiting
        self._acts = acts_around_forward(engine)
        if self._acts:
            # The flops profiler would start there, on one rank: it replaces functions that the compiler looks at.
            engine._config.flops_profiler_config.enabled = False

    @contextlib.contextmanager
    def __call__(self, engine, inputs, kwargs):
        """Yields the inputs and kwargs for the module's forward. What is behind it is left out where it raises."""
        optimizer = engine.optimizer
        optimizer._reducer.follow_stream()
        if torch.is_grad_enabled():
            optimizer._progress.forward_begins()
        if self._waiting is not None:
            # Whatever the forward does: what it may read by itself is there before it, and all is behind it.
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
