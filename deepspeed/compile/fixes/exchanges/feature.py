# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps layers of experts, and exchanges of sequences, out of graphs. What is around them is compiled."""

import functools
from typing import Iterator

import torch
from torch.torch_version import TorchVersion

import deepspeed.comm as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.sequence.cross_entropy import _GatherSequenceLoss
from deepspeed.sequence.layer import _SeqAllToAll

from ...zero_1_and_2.feature import Feature, Request, SetUpContext

_LAYERS = (MoE, AutoEPMoELayer)
# The functions of sequences that graphs of an older torch give no gradient.
_FUNCTIONS = (_SeqAllToAll, _GatherSequenceLoss) if TorchVersion(torch.__version__) < (2, 13) else ()


class Exchanges(Feature):
    """Makes Dynamo leave these layers and functions out for the rest of the process, if the engine has some."""

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        engine, optimizer, module = request.engine, request.optimizer, request.engine.module
        marked = optimizer is not None and any(group.get("moe") for group in optimizer.param_groups)
        if not (marked or any(map(is_moe_param, module.parameters()))):
            return
        if not _layers_of(module):
            yield (
                "parameters are marked as those of experts, and no layer of DeepSpeed's makes process groups for "
                "them; set compile.deepcompile to false"
            )
        if getattr(request.options, "shard_parameters", None) is not None:
            yield (
                "compile.shard_parameters cannot shard experts, which have process groups of their own; leave it out"
            )
        if engine.optimizer_name() == "muon":
            yield "Muon is not supported with experts, which have process groups of their own; use AdamW"
        # Gradients of such experts are sent nowhere, but would wait in buckets of all ranks for the host.
        groups = () if engine.optimizer is None else engine.optimizer.real_dp_process_group
        if engine.zero_cpu_offload() and 1 in map(dist.get_world_size, groups) and dist.get_world_size() > 1:
            yield (
                "zero_optimization.offload_optimizer is not supported where each expert lies on one rank; leave it "
                "out, or use fewer ranks for the experts"
            )

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return request.engine.has_moe_layers or request.engine.sequence_parallel_size > 1

    def __init__(self, context: SetUpContext):
        for layer in _layers_of(context.module):
            _keep_layer_out(layer)
        for function in _FUNCTIONS:
            _keep_function_out(function)


FEATURE = Exchanges


def _layers_of(module):
    """Returns the classes of the layers of experts in a module."""
    return {type(layer) for layer in module.modules() if isinstance(layer, _LAYERS)}


@functools.cache
def _keep_layer_out(layer):
    layer.forward = torch.compiler.disable(layer.forward, reason="its exchange of tokens has no gradient in graphs")


@functools.cache
def _keep_function_out(function):
    # Dynamo breaks the graph at a call of the function, and compiles nothing of what the call runs.
    function.forward = staticmethod(torch.compiler.disable(function.forward, reason="it has no gradient in graphs"))
