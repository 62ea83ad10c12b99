# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How often code is compiled anew, and what happens when that is too often.

Dynamo compiles a frame again for other shapes, other layers and other branches, and beyond a limit leaves it
uncompiled. By itself it reaches the limit on one rank and not on another, and gradients then arrive in other orders.
Evaluation, generation and earlier engines use up what training needs, and nobody is told. So Dynamo's limit is lifted
here. Compilations are counted for each engine, apart for training and evaluation, and training stops using compiled
code on all ranks in one step.
"""

import collections
import contextlib
import logging
import types
import weakref

import torch

from deepspeed.utils import log_dist, logger

# More than any program compiles.
_UNLIMITED = 10**6
# Compilations of one frame behind which DeepCompile says that blocks differ.
_MANY = 4


def own_code(function):
    """Returns a copy of ``function`` of which Dynamo, which counts by code objects, knows nothing yet."""
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def limit_lifted():
    """Returns a context in which Dynamo compiles a frame however often it was compiled before."""
    return torch._dynamo.config.patch(recompile_limit=_UNLIMITED, accumulated_recompile_limit=_UNLIMITED)


class CompilationLimit:
    """Says whether an engine's module, or one of its blocks, runs compiled.

    Args:
        limit: compilations of one frame for training, and the same number again for evaluation.
        reducer: of the engine. Its ranks agree in the optimizer step on going on without compiled code.
        raises: whether too many compilations are an error, as ``fullgraph`` asks.
    """

    # Frames of functions that several engines call, as those behind a graph break, have been compiled that often.
    _is_near = False

    def __init__(self, limit, reducer, raises=False):
        self._limit = limit
        self._reducer = weakref.ref(reducer)
        self._raises = raises
        # Read here, because it is lifted while frames are compiled.
        self._limit_of_dynamo = torch._dynamo.config.recompile_limit
        self._compilations = collections.defaultdict(collections.Counter)
        self._evaluating = False
        self._evaluation_is_over = False
        self._trains_in_eval_mode = False
        self._has_warned = False
        self.has_stopped = False

    def trains(self, module) -> bool:
        """Whether a call of ``module`` belongs to training, and not to evaluation or generation.

        Checkpointing runs a forward without gradients, and once more with them in the backward. Both must run the same
        code, or they would draw different random numbers. So gradient mode alone does not decide.
        """
        if torch.is_grad_enabled():
            self._trains_in_eval_mode = self._trains_in_eval_mode or not module.training
            return True
        return module.training or self._trains_in_eval_mode

    def call_block(self, block, compiled, uncompiled, args, kwargs):
        """Calls the forward of a block, which evaluation and generation run uncompiled."""
        if self.has_stopped or not self.trains(block):
            return uncompiled(block, *args, **kwargs)
        with self._room():
            return compiled(block, *args, **kwargs)

    def compile_module(self, module, **compile_kwargs):
        """Does what ``module.compile(**compile_kwargs)`` does, within this limit."""

        def call(*args, **kwargs):
            return module._call_impl(*args, **kwargs)

        # The limit is kept here, for all ranks.
        compile_kwargs.pop("recompile_limit", None)
        compiled = torch.compile(own_code(call), **compile_kwargs)

        def call_within_limit(*args, **kwargs):
            if self.has_stopped:
                return module._call_impl(*args, **kwargs)
            with self._room():
                if self.trains(module):
                    return compiled(*args, **kwargs)
                return self._evaluate(compiled, args, kwargs)

        # A caller's own torch.compile would make the module part of the caller's graphs, which reduce nothing.
        module._compiled_call_impl = torch.compiler.disable(call_within_limit)

    def _room(self):
        # Lifting the limit takes longer than a small block, and most models never come near it.
        return limit_lifted() if CompilationLimit._is_near else contextlib.nullcontext()

    def _evaluate(self, compiled, args, kwargs):
        before, self._evaluating = self._evaluating, True
        try:
            if not self._evaluation_is_over:
                return compiled(*args, **kwargs)
            with torch.compiler.set_stance("eager_on_recompile"):
                return compiled(*args, **kwargs)
        finally:
            self._evaluating = before

    def compiles(self, frame: int, compilations: int) -> None:
        """Called when a frame is compiled.

        Args:
            frame: Dynamo's number of it.
            compilations: how often it was compiled in this process, by whomever, this time included.
        """
        near = 2 * compilations >= self._limit_of_dynamo
        CompilationLimit._is_near = CompilationLimit._is_near or near
        if compilations == 1:
            # torch._dynamo.reset() has dropped what was compiled before.
            self._compilations[frame].clear()
        # A forward without gradients, of checkpointing or of generation in training mode, has a count of its own.
        purpose = self._evaluating, torch.is_grad_enabled()
        self._compilations[frame][purpose] += 1
        count = self._compilations[frame][purpose]
        if self._evaluating:
            if count > self._limit and not self._evaluation_is_over:
                self._evaluation_is_over = True
                logger.warning(
                    f"Evaluation had one frame compiled {count} times; further shapes are evaluated uncompiled"
                )
            return
        if count > self._limit:
            if self._raises or torch._dynamo.config.fail_on_recompile_limit_hit:
                raise RuntimeError(f"DeepCompile compiled one frame more than {self._limit} times; {_REMEDY}")
            reducer = self._reducer()
            if reducer is not None:
                # This step is still compiled whatever comes, as on the other ranks.
                reducer.ask_to_stop_compiling()
        elif count > _MANY and not self._has_warned:
            self._has_warned = True
            log_dist(
                "DeepCompile compiles parts of the model again and again, because blocks or inputs differ. Blocks of "
                "transformers do so with a cache of keys and values: train in training mode, without use_cache=True",
                ranks=[0],
                level=logging.WARNING,
            )

    def follow_others(self, reducer) -> None:
        """Called in every step when ranks have agreed: stops using compiled code if some rank has asked for that."""
        if self.has_stopped or not reducer.stops_compiling():
            return
        self.has_stopped = True
        log_dist(
            f"DeepCompile compiled one frame of the model more than {self._limit} times on some rank, so all ranks go "
            f"on without compiled code; to have it compiled, {_REMEDY}",
            ranks=[0],
            level=logging.WARNING,
        )


_REMEDY = (
    "make the model's blocks and the shapes of its inputs alike, raise torch._dynamo.config.recompile_limit before "
    "engine.compile(), or set compile.regional_compilation to false"
)
