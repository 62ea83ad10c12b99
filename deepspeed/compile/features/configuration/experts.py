# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options that experts with process groups of their own cannot have.

Refused before the parts refuse their own options, because these name other remedies.
"""

from typing import Iterator, Set

from torch.nn import Module

import deepspeed.comm as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param

from ...zero_1_and_2.feature import Request

_LAYERS = (MoE, AutoEPMoELayer)


def refusals(request: Request) -> Iterator[str]:
    """Yields a sentence for each option that experts cannot have."""
    engine, optimizer, module = request.engine, request.optimizer, request.engine.module
    marked = optimizer is not None and any(group.get("moe") for group in optimizer.param_groups)
    if not (marked or any(map(is_moe_param, module.parameters()))):
        return
    if not layers_of(module):
        yield (
            "parameters are marked as those of experts, and no layer of DeepSpeed's makes process groups for "
            "them; set compile.deepcompile to false"
        )
    if request.options.sharded is not None:
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


def layers_of(module: Module) -> Set[type]:
    """Returns the classes of the layers of experts in a module."""
    return {type(layer) for layer in module.modules() if isinstance(layer, _LAYERS)}
