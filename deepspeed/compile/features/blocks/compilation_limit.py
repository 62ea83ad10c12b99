# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Limits how often code is compiled again.

Dynamo compiles a frame again for other shapes, other layers and other branches, and runs the frame uncompiled once a
limit is reached. Dynamo's own limit does not suit training: earlier engines use up compilations that training needs,
without a message. So this file lifts Dynamo's limit, and a :class:`CompilationLimit` counts compilations for one
engine. A rank whose engine reaches the limit goes on without compiled code; the other ranks need not follow.

Evaluation and generation run uncompiled: they take other shapes than training, and a rank may run them alone.
"""

import collections
import contextlib
import re
import sys
import threading
import weakref
from pathlib import Path
from types import CodeType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch._C._dynamo import eval_frame
from torch.fx import GraphModule
from torch.nn.modules.module import _has_any_global_hook

import deepspeed.comm as dist
from deepspeed.utils import logger

from ...zero_1_and_2.messages import warn
from .guards import set_back

LIMIT_OF_TORCH = "torch._dynamo.config.recompile_limit"
# More than any program compiles.
_UNLIMITED = 10**6
# After more compilations of one frame, DeepCompile warns, and says why Dynamo compiles the frame again.
_MANY = 4
# Matches a guard on a cache of transformers. A model of the caller may have past_key_values of another kind.
_CACHE = re.compile(r"transformers/cache_utils\.py|past_key_values\b.*\.layers\[")
# Matches Dynamo's names of the calls that block_calls.py gives to modules.
_OWN_CALL = re.compile(r"<function (Module|BlockParent|Block)Call\.")
_TORCH = str(Path(torch.__file__).parent)
# As Dynamo treats a frame that has reached its limit: what is compiled runs, and other calls run uncompiled.
_RUN_ONLY = eval_frame._FrameExecStrategy(*2 * [eval_frame._FrameAction.RUN_ONLY])


def _generates(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments generates: gradients are off, and an argument is a cache.

    The cache grows with every token, and code would be compiled for every length. The mode does not decide, because
    reinforcement learning generates in training mode.
    """
    if torch.is_grad_enabled():
        return False
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return cache is not None and any(isinstance(value, cache) for value in (*args, *kwargs.values()))


class _Thread(threading.local):
    """The state of a thread: whether the engine's running call trains, or None if none is running."""

    trains: Optional[bool] = None


class CompilationLimit:
    """Decides whether an engine's module, or one of its blocks, runs compiled.

    Args:
        limit: the most compilations of one frame with gradients, and as many again without them.
        raises: whether too many compilations are an error, as ``fullgraph`` asks.
        name: the setting that ``limit`` comes from.

    Attributes:
        has_stopped: whether this rank has stopped using compiled code.
    """

    # Whether some frame comes near Dynamo's limit. All engines share this flag: several engines may call one function,
    # for example the rest of a function after a graph break, and Dynamo counts all compilations of its frame.
    _near_dynamo_limit = False

    def __init__(self, module: torch.nn.Module, limit: int, raises: bool = False, name: str = LIMIT_OF_TORCH):
        # Dynamo's caches hold this object after the engine is gone.
        self._module = weakref.ref(module)
        self._limit = limit
        self._raises = raises
        self._remedy = _REMEDY.format(name)
        # Read Dynamo's limit now, because the limit is lifted while frames are compiled.
        self._limit_of_dynamo = torch._dynamo.config.recompile_limit
        self._compilations = collections.defaultdict(collections.Counter)
        self._thread = _Thread()
        # Compilations of frames that reduce nothing, and the codes of those that are to be compiled no more.
        self._beside: Dict[int, int] = collections.Counter()
        self._complete: List[CodeType] = []
        self._has_warned = self._has_warned_of_hooks = False
        # Owner of frames (a class of blocks, or "the model") -> where Dynamo last ended the graph of such a frame.
        self._graph_breaks: Dict[str, str] = {}
        # Says which frame has reached the limit, and why Dynamo has compiled it again.
        self._reached = ""
        self.has_stopped = False

    def in_training(self) -> bool:
        """Whether a call, of the module or of a part of it, belongs to training.

        Gradient mode alone does not decide: checkpointing runs a forward without gradients, and runs the forward again
        with gradients in the backward. Both runs must use the same code, or they would draw different random numbers.
        So a call without gradients follows the call around it. Without such a call, the mode of the engine's module
        decides, because trainers may leave a part of the module in evaluation mode while the engine trains.
        """
        if torch.is_grad_enabled():
            return True
        if self._thread.trains is not None:
            return self._thread.trains
        module = self._module()
        return module is not None and module.training

    def trains(self, args: Tuple, kwargs: Dict[str, Any]) -> bool:
        """Whether a call with these arguments belongs to training, and not to generation within it."""
        return self.in_training() and not _generates(args, kwargs)

    def runs_eager(self) -> bool:
        """Whether modules run uncompiled: this rank has stopped, or hooks of all modules are registered.

        No guard of Dynamo checks such hooks, for example those of ``register_module_forward_hook()``.
        """
        if self.has_stopped:
            return True
        if not _has_any_global_hook():
            return False
        if not self._has_warned_of_hooks:
            self._has_warned_of_hooks = True
            warn(
                "Hooks of all modules are registered (torch.nn.modules.module.register_module_...), so the model runs "
                "uncompiled as long as they are; register hooks at modules to have it compiled"
            )
        return True

    def call_block(
        self, block: torch.nn.Module, compiled: Callable, uncompiled: Callable, args: Tuple, kwargs: Dict[str, Any]
    ) -> Any:
        """Calls the forward of a block: ``compiled`` in training, and otherwise ``uncompiled``.

        A block may get a cache in training: the module around it may make one in the first run of a reentrant
        checkpoint. In generation the caller gives the cache to that module.
        """
        around = self._thread.trains
        trains = self.trains(args, kwargs) if around is None else around or torch.is_grad_enabled()
        if self.has_stopped or not trains:
            return uncompiled(block, *args, **kwargs)
        return self._call(compiled, (block, *args), kwargs)

    def call_module(
        self, module: torch.nn.Module, compiled: Optional[Callable], args: Tuple, kwargs: Dict[str, Any]
    ) -> Any:
        """Calls the engine's module or a module that calls blocks: ``compiled`` in training, unless it is None."""
        before, trains = self._thread.trains, self.trains(args, kwargs)
        self._thread.trains = trains
        try:
            if compiled is None or not trains or self.runs_eager():
                return module._call_impl(*args, **kwargs)
            return self._call(compiled, args, kwargs)
        finally:
            self._thread.trains = before

    def _call(self, compiled, args, kwargs):
        """Calls ``compiled`` in a context in which Dynamo compiles frames again without a limit of its own."""
        room: Any = contextlib.nullcontext()
        # Lift the limit only if needed: lifting takes longer than a small block, and most models stay far below it.
        if CompilationLimit._near_dynamo_limit:
            room = torch._dynamo.config.patch(recompile_limit=_UNLIMITED, accumulated_recompile_limit=_UNLIMITED)
        try:
            with room:
                return compiled(*args, **kwargs)
        finally:
            set_back()
            # Not before the compilation has ended, because Dynamo then lets a frame be compiled again.
            if self._complete:
                complete, self._complete = self._complete, []
                for code in complete:
                    eval_frame.set_code_exec_strategy(code, _RUN_ONLY)

    def compiles(self, frame: int, compilations: int, what: str, graph_break: str) -> None:
        """Called when a frame is compiled.

        Args:
            frame: Dynamo's number of the frame.
            compilations: how often this process has compiled the frame for any engine, this time included.
            what: the owner of the frame: the class of a block, or "the model".
            graph_break: where Dynamo has ended the frame's graph, and why; "" if the graph goes to the frame's end.

        Raises:
            RuntimeError: if the frame was compiled too often for training, and the caller wants an error then.
        """
        near = 2 * compilations >= self._limit_of_dynamo
        CompilationLimit._near_dynamo_limit = CompilationLimit._near_dynamo_limit or near
        if compilations == 1:
            # The frame is new, or torch._dynamo.reset() has dropped its compilations.
            self._compilations[frame].clear()
        if graph_break:
            self._graph_breaks[what] = graph_break
        # A forward without gradients, as of checkpointing, has a count of its own.
        self._compilations[frame][torch.is_grad_enabled()] += 1
        count = self._compilations[frame][torch.is_grad_enabled()]
        if count > self._limit:
            if self._raises or torch._dynamo.config.fail_on_recompile_limit_hit:
                raise RuntimeError(
                    f"DeepCompile compiled one frame more than {self._limit} times: {self._why(what)}. {self._remedy}"
                )
            self._reached = self._why(what)
        elif count > _MANY and not self._has_warned:
            self._has_warned = True
            warn(f"DeepCompile has compiled one frame {count} times: {self._why(what)}")

    def compiles_beside(self, frame: int, code: CodeType, what: str) -> None:
        """Called when a frame is compiled that reduces nothing, such as a function that logs metrics by name.

        Dynamo's own limit applies to it, and this one where that is lifted, so that it is not compiled for ever.

        Args:
            frame, what: as in :meth:`compiles`.
            code: the frame's, which runs uncompiled from then on, but for calls that fit what is compiled.
        """
        self._beside[frame] += 1
        if CompilationLimit._near_dynamo_limit and self._beside[frame] >= self._limit:
            self._complete.append(code)
            warn(f"DeepCompile compiles {code.co_name} no more, after {self._limit} times: {self._why(what)}")

    def _why(self, what):
        """Says why a frame of ``what`` is being compiled again."""
        guard = failed_guard()
        why = f"a frame of {what}" + (f", because this guard of Dynamo failed: {guard}" if guard else "")
        if _CACHE.search(guard):
            why += ". Pass use_cache=False, because a layer finds the cache filled by other numbers of earlier layers"
        if what in self._graph_breaks:
            why += f". A graph of {what} ends early, at {self._graph_breaks[what]}"
        return why

    def stop_if_exceeded(self) -> None:
        """Called after a step of the engine: stops using compiled code if the limit was reached since the last step.

        Stopping earlier would be wrong, because checkpointing must rerun a block with the code that ran first.
        """
        if self.has_stopped or not self._reached:
            return
        self.has_stopped = True
        logger.warning(
            f"DeepCompile compiled one frame more than {self._limit} times, so rank "
            f"{dist.get_rank()} goes on without compiled code: {self._reached}. {self._remedy}"
        )


_REMEDY = "To have it compiled as often as that, raise {} before engine.compile()"


# Dynamo's own words ------------------------------------------------------------------------------------------------


def failed_guard() -> str:
    """Returns the guard whose failure makes Dynamo compile a frame again, or "" if none is known.

    For example ``self.count == 3  # x = x * self.count  # model.py:12 in forward``.
    """
    with _what_dynamo_lacks():
        reason = torch._dynamo.utils.get_metrics_context()._metrics.get("recompile_reason") or ""
        # It begins with Dynamo's number of the code that did not fit, and may go on with a stack trace.
        _, _, guard = reason.partition("\n")[0].partition(": ")
        return " ".join(guard.split())
    return ""


def graph_break(gm: GraphModule) -> str:
    """Returns file, line and cause if Dynamo ended a frame's graph in the middle of the frame, and otherwise ""."""
    with _what_dynamo_lacks():
        return _described(gm.compile_subgraph_reason)
    return ""


def _what_dynamo_lacks():
    """Context that ignores attributes of Dynamo that this torch lacks: they shape warnings only."""
    return contextlib.suppress(AttributeError)


def _described(reason):
    # Dynamo must end a graph at a module with a Call.
    if not reason.graph_break or _OWN_CALL.search(reason.reason):
        return ""
    stack = [frame for frame in reason.user_stack if not frame.filename.startswith(_TORCH)] or reason.user_stack
    lines = [line.strip() for line in reason.reason.splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    cause = (explained or lines or [""])[0]
    return f"{stack[-1].filename}:{stack[-1].lineno} ({cause.rstrip('.')})" if stack else cause
