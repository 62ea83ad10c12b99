# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes training forwards of transformers' models run without the cache of keys and values.

A training forward has no use for the cache. With the cache, each layer would be compiled again, because each layer
finds the cache filled by a different number of earlier layers. Under gradient checkpointing, transformers itself
switches the cache off.
"""

import contextlib
import functools
import inspect
import sys
import weakref
from typing import List

import torch
from torch.nn import Module

from ...zero_1_and_2.feature import Feature, SetUpContext
from ...zero_1_and_2.hooks import Hook
from ...zero_1_and_2.messages import warn


class TrainWithoutCache(Feature):
    """Adds hooks to the models of transformers in an engine's module."""

    def __init__(self, context: SetUpContext):
        train_without_cache(context.module, context.undo)


FEATURE = TrainWithoutCache


def train_without_cache(module: Module, undo: contextlib.ExitStack) -> None:
    """Adds hooks to the outermost models of transformers in ``module``, and to ``undo`` what removes the hooks.

    ``module`` is the engine's, and a forward trains if ``module`` is in training mode and gradients are enabled. The
    mode of a model inside ``module`` says nothing: ``from_pretrained()`` returns a model in evaluation mode, and
    Lightning, for one, leaves it so.

    If ``module`` is such a model, the hook passes ``use_cache=False`` to each training forward whose caller has not
    chosen. In a model inside ``module``, the hook does so only for calls with labels: without labels, the code around
    the model may want the cache.
    """
    models = [model for model in _outermost(module) if _has_switch(model)]
    if models:
        names = sorted({type(model).__name__ for model in models})
        warn(
            f"Training forwards of {names} run with use_cache=False, as under gradient checkpointing; call them with "
            "use_cache=True to have a cache of keys and values"
        )
    # A strong reference would make a cycle of the module and its hooks.
    reference = weakref.ref(module)
    for model in models:
        hook = Hook(functools.partial(_without if model is module else _without_if_labelled, reference))
        undo.callback(model.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _outermost(module) -> List[Module]:
    # Reading an attribute of `transformers` itself imports a file, which fails where transformers is broken.
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return []
    if isinstance(module, base):
        return [module]
    return [model for child in module.children() for model in _outermost(child)]


def _has_switch(model):
    """Whether a model's forward keeps a cache by default, and takes the argument ``use_cache``."""
    keeps = any(
        getattr(getattr(submodule, "config", None), "use_cache", None) is True for submodule in model.modules()
    )
    parameters = inspect.signature(model.forward).parameters
    # Models that generate pass unknown keyword arguments on to their inner model, which has the layers.
    hands_on = model.can_generate() and any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return keeps and ("use_cache" in parameters or hands_on)


def _without(reference, _, inputs, kwargs):
    said = len(inputs) > 1 or kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
    module = reference()
    # The engine's module may be gone, and the model within it be used on.
    if said or module is None or not (module.training and torch.is_grad_enabled()):
        return None
    return inputs, {**kwargs, "use_cache": False}


def _without_if_labelled(reference, model, inputs, kwargs):
    return None if kwargs.get("labels") is None else _without(reference, model, inputs, kwargs)
