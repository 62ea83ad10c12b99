# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What happens around each forward of an engine under DeepCompile ZeRO-1/2.

DeepSpeed does some of it in hooks of the module, which it removes, because they would be compiled with the module.
"""

import contextlib
import logging
import sys

import torch

from deepspeed.utils import log_dist

from .zero_options import acts_around_forward


class AroundForward:
    """A context for each forward.

    Args:
        engine: whose forwards these are; its optimizer is attached already.
        waiting: None, or the ``Waiting`` for parameters that are on their way.

    Attributes:
        trains_in_evaluation_mode: whether a step was taken with the module in evaluation mode.
    """

    def __init__(self, engine, waiting):
        self._waiting = waiting
        self._acts = acts_around_forward(engine)
        if self._acts:
            # The flops profiler would start there, on one rank: it replaces functions that the compiler looks at.
            engine._config.flops_profiler_config.enabled = False
        self.trains_in_evaluation_mode = False
        self._cache_switches = cache_switches(engine.module)
        if any(config.use_cache for config in self._cache_switches):
            log_dist("Training forwards run as with use_cache=False", ranks=[0], level=logging.INFO)

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
        asks_for_cache = kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
        trains = torch.is_grad_enabled() and (engine.module.training or self.trains_in_evaluation_mode)
        with without_cache(self._cache_switches if trains and not asks_for_cache else ()):
            yield inputs, kwargs
        if acts:
            engine._forward_epilogue()
        if self._waiting is not None:
            self._waiting.leave()


def cache_switches(module):
    """Lists the configurations of transformers, in a module, that say whether to keep keys and values for generation.

    A training forward has no use for them, but each layer would be compiled by itself, since it finds the cache filled
    by those before. transformers switches the cache off itself under gradient checkpointing.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    configs = {id(config): config for config in (vars(each).get("config") for each in module.modules())}
    return [
        config
        for config in configs.values()
        if isinstance(config, transformers.PretrainedConfig) and hasattr(config, "use_cache")
    ]


@contextlib.contextmanager
def without_cache(configs):
    """Has ``use_cache`` be false in these, unless it is given by name."""
    switched = [config for config in configs if config.use_cache]
    for config in switched:
        config.use_cache = False
    try:
        yield
    finally:
        for config in switched:
            config.use_cache = True
