# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps DeepSpeed's layers of experts, and its exchanges of sequences, out of graphs that would lose their gradients.

To DeepSpeed: ``MOELayer`` and ``DistributedAttention`` send tokens, and ``_GatherSequenceLoss`` losses, in autograd
functions that fill a tensor by a collective. Dynamo traces into them, and the graph's gradient is zero (functions of
sequences: before torch 2.13). ``deepspeed::dim_zero_all_to_all`` of ``sequence/layer.py`` says how to make them
operators. What the gate decides is read on the host too, which breaks a graph anyway.
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch.torch_version import TorchVersion

from deepspeed.sequence.cross_entropy import _GatherSequenceLoss
from deepspeed.sequence.layer import _SeqAllToAll

from ...features.configuration.refused import layers_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# The functions of sequences that graphs of an older torch give no gradient.
_FUNCTIONS = (_SeqAllToAll, _GatherSequenceLoss) if TorchVersion(torch.__version__) < (2, 13) else ()


def keep_out_of_graphs(engine: "DeepSpeedEngine") -> None:
    """Makes Dynamo leave these layers and functions out for the rest of the process, if the engine has some."""
    if engine.has_moe_layers or engine.sequence_parallel_size > 1:
        for layer in layers_of(engine.module):
            _keep_layer_out(layer)
        for function in _FUNCTIONS:
            _keep_function_out(function)


@functools.cache
def _keep_layer_out(layer):
    layer.forward = torch.compiler.disable(layer.forward, reason="its exchange of tokens has no gradient in graphs")


@functools.cache
def _keep_function_out(function):
    # Dynamo breaks the graph at a call of the function, and compiles nothing of what the call runs.
    function.forward = staticmethod(torch.compiler.disable(function.forward, reason="it has no gradient in graphs"))
