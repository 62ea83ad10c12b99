# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes models of transformers generate until the texts of all ranks have ended (``compile.shard_parameters``).

A rank whose texts have ended would go on with something else while others still gather blocks for theirs. Transformers
has ``generate(synced_gpus=True)`` for this case, but trainers choose it for ZeRO-3 and FSDP alone.
"""

import contextlib
import functools
import inspect
import weakref
from typing import Any

from torch.distributed import ProcessGroup
from torch.nn import Module

import deepspeed.comm as dist

from .whole_units import WholeUnits


def synchronize_generation(
    module: Module, whole: WholeUnits, process_group: ProcessGroup, undo: contextlib.ExitStack
) -> None:
    """Passes ``synced_gpus`` to the models in ``module`` whose ``generate()`` takes it, until ``undo`` is closed.

    Args:
        whole: knows whether parameters are whole. Each rank then generates by itself.
        process_group: of the ranks that share parameters. ``synced_gpus`` waits for all ranks that there are, so where
            others share none, calls stay as they are.
    """
    if not 1 < dist.get_world_size(process_group) == dist.get_world_size():
        return
    for model in module.modules():
        # Read the class: modules of peft have the attributes of the model within.
        method = getattr(type(model), "generate", None)
        waits = callable(method) and "synced_gpus" in inspect.signature(method).parameters
        # What somebody has put in the method's place may do anything.
        if waits and getattr(model.generate, "__func__", None) is method:
            vars(model)["generate"] = made = _Generate(model, whole)
            undo.callback(_take_out, weakref.ref(model), made)


def _take_out(reference, made):
    model = reference()
    if model is not None and vars(model).get("generate") is made:
        del vars(model)["generate"]


class _Generate:
    """Takes the place of the method ``generate`` of a model, but not in deep copies and pickles of the model."""

    def __init__(self, model: Module, whole: WholeUnits):
        method = type(model).generate
        functools.update_wrapper(self, method)
        self.__signature__ = inspect.signature(model.generate)
        # The model has this object, and a bound method would have the model.
        self._method, self._model, self._whole = method, weakref.ref(model), whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.__signature__.bind(*args, **kwargs)
        if not self._whole.are_fixed:
            call.arguments["synced_gpus"] = True
        return self._method(self._model(), *call.args, **call.kwargs)

    def __reduce__(self) -> Any:
        # A copy has no such attribute yet, so it finds the method of its class.
        return getattr, (self._model(), "generate")
