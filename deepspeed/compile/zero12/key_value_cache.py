# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Has training forwards of transformers' models keep no cache of keys and values.

A training forward has no use for the cache, but with it each layer is compiled by itself, because each finds it filled
by the layers before. transformers switches it off under gradient checkpointing.
"""

import inspect
import logging
import sys
from typing import Callable, List

import torch
from torch.nn import Module

from deepspeed.utils import log_dist


def train_without_cache(module: Module) -> Callable[[], None]:
    """Adds hooks to the outermost models of transformers in ``module``. Returns a function to remove them.

    A model that is ``module`` itself gets ``use_cache=False`` in each training forward that does not say otherwise. A
    model inside of another module gets it if called with labels: otherwise it may be called for the cache.
    """
    models = [each for each in _outermost(module) if _has_switch(each)]
    if models:
        names = sorted({type(model).__name__ for model in models})
        log_dist(
            f"Training forwards of {names} run with use_cache=False, as under gradient checkpointing; call them with "
            "use_cache=True to have a cache of keys and values",
            ranks=[0],
            level=logging.WARNING,
        )
    handles = [
        model.register_forward_pre_hook(_without if model is module else _without_if_labelled, with_kwargs=True)
        for model in models
    ]

    def remove():
        for handle in handles:
            handle.remove()

    return remove


def _outermost(module) -> List[Module]:
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is None:
        return []
    if isinstance(module, base):
        return [module]
    return [model for child in module.children() for model in _outermost(child)]


def _has_switch(model):
    """Whether a forward keeps a cache unless it is told not to, and can be told."""
    keeps = any(getattr(getattr(each, "config", None), "use_cache", None) is True for each in model.modules())
    parameters = inspect.signature(model.forward).parameters
    # Models that generate hand other arguments on to the model within that has the layers.
    hands_on = model.can_generate() and any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return keeps and ("use_cache" in parameters or hands_on)


# Functions of the module, so that a model can be copied and pickled with its hooks.
def _without(model, inputs, kwargs):
    said = len(inputs) > 1 or kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
    if said or not (model.training and torch.is_grad_enabled()):
        return None
    return inputs, {**kwargs, "use_cache": False}


def _without_if_labelled(model, inputs, kwargs):
    return None if kwargs.get("labels") is None else _without(model, inputs, kwargs)
