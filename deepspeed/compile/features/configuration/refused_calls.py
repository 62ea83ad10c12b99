# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Refuses calls of ``engine.compile()`` that would lose gradients, or whose graphs would reduce none or wrong ones."""

from typing import TYPE_CHECKING, Iterator

import torch
from torch.torch_version import TorchVersion

from deepspeed.compile.passes import zero_1_and_2_compile
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer

from ...zero_1_and_2.feature import Request

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def refused_calls(request: Request) -> Iterator[str]:
    """Yields a sentence for each reason why a call cannot be honoured."""
    yield from _unsupported_graphs(request)
    # Nothing runs the base's passes: graphs get their reductions before a schedule begins.
    if request.engine.zero_optimization_stage() == 2:
        name, own_pass = zero_1_and_2_compile.NAME_Z2, zero_1_and_2_compile.add_z2_reduce
    else:
        name, own_pass = zero_1_and_2_compile.NAME_Z1, zero_1_and_2_compile.add_z1_reduce
    if request.schedule is not None and request.schedule != [(0, [own_pass])]:
        yield (
            f"`schedule` may only be [(0, ['{name}'])], because gradients are handled before the graphs that "
            "scheduled passes rewrite exist; leave `schedule` out"
        )
    if has_gradients(request.engine):
        yield (
            "gradients computed before engine.compile() would be lost; call it before the first backward or after "
            "engine.step() at the gradient accumulation boundary"
        )


def _unsupported_graphs(request):
    """Yields a sentence for each option with which graphs would reduce no gradients, or wrong ones."""
    from torch._inductor import config, list_mode_options

    if torch.nn.functional.linear is zero3_linear_wrap and TorchVersion(torch.__version__) < "2.13":
        # ZeRO-3 replaces it for the life of the process.
        yield (
            "an engine of ZeRO-3 in this process has replaced torch.nn.functional.linear, and torch "
            f"{torch.__version__} compiles the replacement to gradients of zero; set zero_optimization."
            "memory_efficient_linear to false for that engine, or torch.nn.functional.linear to torch._C._nn.linear "
            "before this one compiles, or install torch 2.13 or newer"
        )
    if request.backend == "eager":
        return
    mode, options = request.compile_kwargs.get("mode"), request.compile_kwargs.get("options") or {}
    patches = {**list_mode_options().get(mode, {}), **options}
    if patches.get("triton.cudagraphs", config.triton.cudagraphs):
        yield (
            "CUDA graphs (compile_kwargs mode 'reduce-overhead' or 'max-autotune', or option triton.cudagraphs) "
            "cannot record reductions that are decided at run time; use mode 'max-autotune-no-cudagraphs' or none"
        )
    if patches.get("selective_decompose", getattr(config, "selective_decompose", False)):
        yield (
            "the option selective_decompose of torch.compile (which compile_kwargs mode 'lite' sets) drops the notes "
            "that say which gradient is whose; remove it or use another mode"
        )
    if patches.get("custom_partitioner_fn", config.custom_partitioner_fn) is not None:
        yield (
            "the option custom_partitioner_fn of torch.compile is taken: DeepCompile's partitioner inserts the "
            "reductions; remove it"
        )


def has_gradients(engine: "DeepSpeedEngine") -> bool:
    """Whether an engine that is not compiled yet holds gradients that no step has used."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return False
    if optimizer.cpu_offload and optimizer.micro_step_id != INITIAL_MICRO_STEP_ID:
        # Gradients are on the host, where a rank's gradients depend on its partition, but all ranks must answer alike.
        return True
    held = [*optimizer.averaged_gradients.values(), *optimizer.all_grad_tensors.values()]
    for group in optimizer.bit16_groups:
        held += [gradient for parameter in group for gradient in (parameter.grad, parameter.grad_accum)]
    return any(gradient is not None for gradient in held)
