# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps DeepSpeed's layers of experts out of graphs. What is around them is compiled."""

import functools
from typing import Iterator

import torch

from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param

from ...zero_1_and_2.feature import Feature, Request, SetUpContext

_LAYERS = (MoE, AutoEPMoELayer)


class Experts(Feature):
    """Has Dynamo leave the layers out, in this process from then on, if the engine has some."""

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        optimizer, module = request.optimizer, request.engine.module
        marked = optimizer is not None and any(group.get("moe") for group in optimizer.param_groups)
        if not (marked or any(map(is_moe_param, module.parameters()))):
            return
        if not _layers_of(module):
            yield (
                "parameters are marked as those of experts, and no layer of DeepSpeed's makes process groups for "
                "them; set compile.deepcompile to false"
            )
        if getattr(request.options, "shard_parameters", None) is not None:
            yield "compile.shard_parameters cannot shard experts, which not all ranks have; leave it out"
        if request.engine.optimizer_name() == "muon":
            yield "Muon is not supported with experts, which have process groups of their own; use AdamW"

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return request.engine.has_moe_layers

    def __init__(self, context: SetUpContext):
        for layer in _layers_of(context.module):
            _keep_out(layer)


FEATURE = Experts


def _layers_of(module):
    """Returns the classes of the layers of experts in a module."""
    return {type(layer) for layer in module.modules() if isinstance(layer, _LAYERS)}


@functools.cache
def _keep_out(layer):
    layer.forward = torch.compiler.disable(layer.forward, reason="its exchange of tokens has no gradient in graphs")
