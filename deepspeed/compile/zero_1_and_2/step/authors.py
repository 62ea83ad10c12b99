# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Finds out whether an optimizer's ``step()`` is the unpatched one of torch or DeepSpeed."""

from types import CellType, FunctionType, MethodType
from typing import Callable, List

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Modules of torch whose functions only wrap `func`: hooks of step(), a scheduler's note of a call, torch.no_grad().
_WRAPPERS = {"torch.optim.optimizer", "torch.optim.lr_scheduler", "torch.utils._contextlib"}
_PACKAGES = {"torch", "deepspeed"}


def runs_unpatched_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` runs the code of the optimizer's class, and nothing else.

    Other code may replace ``step()`` on the instance or on the class, or the class, at any time. This does not check
    the functions that ``step()`` calls. Torch's own hooks of all optimizers count steps for a profiler, so code that
    steps in place of ``optimizer.step()`` must call :func:`hooks_of_torch`.
    """
    return (
        not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not _global_optimizer_pre_hooks
        and all(_package(hook.__module__) == "torch" for hook in hooks_of_torch())
        and _runs_own_step(optimizer)
    )


def hooks_of_torch() -> List[Callable]:
    """Returns the functions that every ``step()`` calls at its end with (optimizer, args, kwargs)."""
    return list(_global_optimizer_post_hooks.values())


def _runs_own_step(optimizer):
    """Whether ``optimizer.step()`` runs the ``step()`` of the optimizer's class, with no wrappers but torch's.

    Attributes of a function prove nothing, because torch's wrappers and ``functools.wraps`` copy them. But a
    function's closure has the function that it wraps, and its globals name its module. Neither can be copied.
    """
    function = optimizer.step
    while True:
        if isinstance(function, MethodType):
            if function.__self__ is not optimizer:
                return False
            function = function.__func__
        if not isinstance(function, FunctionType):
            return False
        # Of generated source, it is empty.
        module = function.__globals__.get("__name__", "")
        if module not in _WRAPPERS:
            authors = {cls.__module__ for cls in type(optimizer).__mro__[:-1]}
            return module in authors and _package(module) in _PACKAGES and function.__code__.co_name == "step"
        held = _closure(function)
        # A scheduler's wrapper steps the optimizer for which it was made.
        if "opt_ref" in held and held["opt_ref"]() is not optimizer:
            return False
        # Any context manager of torch may decorate a function in this way.
        if "ctx_factory" in held and type(getattr(held["ctx_factory"], "__self__", None)) is not torch.no_grad:
            return False
        function = held.get("func")


def _package(module):
    return module.partition(".")[0]


def _closure(function):
    """Returns name -> value of the variables of outer functions that a function uses."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}
