# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps DeepSpeed's layers of experts, and its exchanges of sequences, out of graphs that would lose their gradients.

To DeepSpeed: ``MOELayer`` and ``DistributedAttention`` send tokens, and ``_GatherSequenceLoss`` losses, in autograd
functions that fill a tensor by a collective. Dynamo traces into them, and the graph's gradient is zero (functions of
sequences: before torch 2.13). ``deepspeed::dim_zero_all_to_all`` of ``sequence/layer.py`` says how to make them
operators. What the gate decides is read on the host too, which breaks a graph anyway.
"""

import functools
from typing import TYPE_CHECKING, Iterator

import torch
from torch.torch_version import TorchVersion

import deepspeed.comm as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.sequence.cross_entropy import _GatherSequenceLoss
from deepspeed.sequence.layer import _SeqAllToAll

from ...zero_1_and_2.feature import Request

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_LAYERS = (MoE, AutoEPMoELayer)
# The functions of sequences that graphs of an older torch give no gradient.
_FUNCTIONS = (_SeqAllToAll, _GatherSequenceLoss) if TorchVersion(torch.__version__) < (2, 13) else ()


def keep_out_of_graphs(engine: "DeepSpeedEngine") -> None:
    """Makes Dynamo leave these layers and functions out for the rest of the process, if the engine has some."""
    if engine.has_moe_layers or engine.sequence_parallel_size > 1:
        for layer in _layers_of(engine.module):
            _keep_layer_out(layer)
        for function in _FUNCTIONS:
            _keep_function_out(function)


def refusals(request: Request) -> Iterator[str]:
    """Yields a sentence for each option that experts cannot have."""
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
        yield ("compile.shard_parameters cannot shard experts, which have process groups of their own; leave it out")
    if engine.optimizer_name() == "muon":
        yield "Muon is not supported with experts, which have process groups of their own; use AdamW"
    # Gradients of such experts are sent nowhere, but would wait in buckets of all ranks for the host.
    groups = () if engine.optimizer is None else engine.optimizer.real_dp_process_group
    if engine.zero_cpu_offload() and 1 in map(dist.get_world_size, groups) and dist.get_world_size() > 1:
        yield (
            "zero_optimization.offload_optimizer is not supported where each expert lies on one rank; leave it "
            "out, or use fewer ranks for the experts"
        )


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
