# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Whether nobody but torch, DeepSpeed and Python's authors has written what an optimizer's ``step()`` runs."""

import functools
import sys
from types import CellType, FunctionType, MethodType
from typing import Any, Callable, Dict, List

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Modules of torch whose functions only wrap `func`: hooks of step(), a scheduler's note of a call, torch.no_grad().
_WRAPPERS = {"torch.optim.optimizer", "torch.optim.lr_scheduler", "torch.utils._contextlib"}
# Whose functions an optimizer may call.
_PACKAGES = {"torch", "deepspeed", "builtins", *sys.stdlib_module_names} - {"__main__", "unittest"}
# How the names of functions begin that Dynamo has made of others.
_OF_DYNAMO = "__compiled_fn_"
# What calls another function -> the attribute that has it.
_INNER = {
    **dict.fromkeys((staticmethod, classmethod, MethodType), "__func__"),
    **{functools.partial: "func", functools._lru_cache_wrapper: "__wrapped__"},
}
# Class of an optimizer -> what its step() may call, when nobody else had written any of it.
_known: Dict[type, List[Any]] = {}


def steps_as_written(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` runs what the authors of the optimizer's class have written, and nothing else.

    Somebody else may have replaced ``step()`` on the instance or on the class, a function that it calls, or the class,
    and may do so at any time. Torch's own hooks of all optimizers count steps for a profiler. Who steps in place of
    ``optimizer.step()`` calls :func:`hooks_of_torch`.
    """
    return (
        not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not _global_optimizer_pre_hooks
        and not any(map(is_replaced, _global_optimizer_post_hooks.values()))
        and _runs_own_step(optimizer)
        and not _calls_others(optimizer)
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
            return module in authors and module.partition(".")[0] in _PACKAGES and function.__code__.co_name == "step"
        held = _closure(function)
        # A scheduler's wrapper steps the optimizer for which it was made.
        if "opt_ref" in held and held["opt_ref"]() is not optimizer:
            return False
        # Each class of contexts may decorate a function so.
        if "ctx_factory" in held and type(getattr(held["ctx_factory"], "__self__", None)) is not torch.no_grad:
            return False
        function = held.get("func")


def _calls_others(optimizer):
    """Whether somebody else has written a function that an optimizer's ``step()`` may call."""
    cls = type(optimizer)
    classes = [base for base in cls.__mro__ if base.__module__ not in ("torch.optim.optimizer", "builtins")]
    namespaces = [*map(vars, classes), *(vars(sys.modules[base.__module__]) for base in classes)]
    # Dynamo puts what it has compiled into the namespace of the module that it has compiled.
    entries = (entry for namespace in namespaces for entry in namespace.items())
    called = [cls._optimizer_step_code, *(value for name, value in entries if not name.startswith(_OF_DYNAMO))]
    hidden = {"_optimizer_step_code", *(name for base in classes for name in vars(base))} - {"step"}
    hiding = [vars(optimizer)[name] for name in hidden & vars(optimizer).keys()]
    # Lists are equal if their entries are the same objects, which takes less time than to look into functions.
    if any(map(is_replaced, hiding if called == _known.get(cls) else hiding + called)):
        return True
    _known[cls] = called
    return False


def is_replaced(value: Any) -> bool:
    """Whether ``value`` is, or calls by its closure, a function of neither torch nor DeepSpeed nor Python itself."""
    found, seen = [value], set()
    for value in found:
        # A function may be in its own closure.
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in _INNER:
            found.append(getattr(value, _INNER[type(value)]))
            continue
        is_function = isinstance(value, FunctionType)
        author = _module(value) if is_function else type(value).__module__ if callable(value) else "builtins"
        if author.partition(".")[0] not in _PACKAGES:
            return True
        if is_function:
            found += _closure(value).values()
    return False


def _module(function):
    """Returns the name of the module that has a function's source, empty if a program has made the source."""
    return function.__globals__.get("__name__", "")


def _closure(function):
    """Returns name -> value of the variables of outer functions that a function uses."""
    held = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in held if cell != CellType()}
