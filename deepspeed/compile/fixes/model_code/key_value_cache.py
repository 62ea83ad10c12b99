# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes training forwards of transformers' models run without the cache of keys and values.

To transformers: a training forward fills a cache that nobody reads, unless gradient checkpointing is on. Under
``torch.compile`` each layer is compiled again, because it finds the cache filled by another number of layers. Please
leave the cache out in training mode where ``labels`` are given and the caller has not asked for it.
"""

import contextlib
import functools
import inspect
import sys
from typing import Callable, List

import torch
from torch.nn import Module

from ...zero_1_and_2.hooks import Hook
from ...zero_1_and_2.messages import warn


def train_without_cache(module: Module, undo: contextlib.ExitStack, in_training: Callable[[], bool]) -> None:
    """Adds hooks to the outermost models of transformers in ``module``, and their removal to ``undo``.

    The hook passes ``use_cache=False`` to each training call with labels whose caller has not chosen. Without labels
    the caller may want the cache. So without labels the hook acts only if ``module`` itself is such a model, is in
    training mode, and gradients are enabled.

    Args:
        in_training: ``CompilationLimit.in_training()``, which also decides what runs compiled.
    """
    models = [model for model in _outermost(module) if _has_switch(model)]
    if models:
        names = sorted({type(model).__name__ for model in models})
        warn(
            f"Training forwards of {names} run with use_cache=False, as under gradient checkpointing; call them with "
            "use_cache=True to have a cache of keys and values"
        )
    for model in models:
        hook = Hook(functools.partial(_without_cache, in_training, model is module))
        undo.callback(model.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _outermost(module) -> List[Module]:
    # Do not read an attribute of `transformers` itself: that imports a file, which fails if transformers is broken.
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


def _without_cache(in_training, is_module, model, inputs, kwargs):
    said = len(inputs) > 1 or kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
    if said or not in_training():
        return None
    if kwargs.get("labels") is None and not (is_module and model.training and torch.is_grad_enabled()):
        return None
    return inputs, {**kwargs, "use_cache": False}
