# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Whether an optimizer's ``step()`` is the one that torch's or DeepSpeed's authors have written."""

from types import CellType, FunctionType, MethodType
from typing import Callable, List

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Modules of torch whose functions only wrap `func`: hooks of step(), a scheduler's note of a call, torch.no_grad().
_WRAPPERS = {"torch.optim.optimizer", "torch.optim.lr_scheduler", "torch.utils._contextlib"}
_PACKAGES = {"torch", "deepspeed"}


def runs_unpatched_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` runs what the authors of the optimizer's class have written, and nothing else.

    Somebody else may have replaced ``step()`` on the instance or on the class, or the class, and may do so at any
    time. Functions that ``step()`` calls are not looked at. Torch's own hooks of all optimizers count steps for a
    profiler. Who steps in place of ``optimizer.step()`` calls :func:`hooks_of_torch`.
    """
    return (
        not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not _global_optimizer_pre_hooks
        and all(_package(hook.__module__) == "torch" for hook in hooks_of_torch())
        and _runs_own_step(optimizer)
    )


def hooks_of_torch() -> List[Callable]:
    """Returns what each optimizer's ``step()`` calls in the end, with the optimizer and its two kinds of arguments."""
    return list(_global_optimizer_post_hooks.values())


def _runs_own_step(optimizer):
    """Whether ``optimizer.step()`` runs the ``step()`` of the optimizer's authors, within wrappers of torch at most.

    A mark on a function proves nothing: torch's wrappers, and ``functools.wraps``, copy all marks. What a function
    calls is in its closure, and who has written a function is in its globals. Neither can be copied.
    """
    function = optimizer.step
    while True:
        if isinstance(function, MethodType):
            if function.__self__ is not optimizer:
                return False
            function = function.__func__
        if not isinstance(function, FunctionType):
            return False
        module = _module(function)
        if module not in _WRAPPERS:
            authors = {cls.__module__ for cls in type(optimizer).__mro__[:-1]}
            return module in authors and _package(module) in _PACKAGES and function.__code__.co_name == "step"
        held = _closure(function)
        # A scheduler's wrapper steps the optimizer for which it was made.
        if "opt_ref" in held and held["opt_ref"]() is not optimizer:
            return False
        # Each class of contexts may decorate a function so.
        if "ctx_factory" in held and type(getattr(held["ctx_factory"], "__self__", None)) is not torch.no_grad:
            return False
        function = held.get("func")


def _package(module):
    return module.partition(".")[0]


def _module(function):
    """Returns the name of the module that has a function's source, empty if a program has made the source."""
    return function.__globals__.get("__name__", "")


def _closure(function):
    """Returns name -> value of the variables of outer functions that a function uses."""
    held = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in held if cell != CellType()}
