# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which options DeepCompile ZeRO-1/2 honours. Those it cannot are refused, each in one sentence."""

import torch
from torch.torch_version import TorchVersion

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .passes import zero_1_and_2_compile

OLDEST_TORCH = "2.11"

# Options of the section `compile` that only ZeRO-3's passes implement: name -> the value that asks for nothing.
_ZERO3_ONLY = {
    "offload_activation": False,
    "offload_opt_states": False,
    "offload_parameters": False,
    "symmetric_memory": False,
    "sync_before_allgather": False,
    "sync_after_allgather": False,
    "free_activation": False,
    "keep_int_input_tensors": True,
    "keep_all_input_tensors": False,
}


def overlaps_communication(engine, compile_config):
    """Whether buckets may travel while the backward goes on: unless ``overlap_comm`` or ``double_buffer`` is false."""
    zero_config = engine._config.zero_config
    asked_not_to = "overlap_comm" in zero_config.model_fields_set and zero_config.overlap_comm is False
    return compile_config.double_buffer and not asked_not_to


def check_options(engine, backend, compile_config, compile_kwargs, schedule, use_z2):
    """Raises ValueError or RuntimeError, in one sentence, for anything that would train wrongly or be ignored."""
    for problem in _problems(engine, backend, compile_config, compile_kwargs, schedule, use_z2):
        raise ValueError(f"DeepCompile with ZeRO stage {2 if use_z2 else 1}: {problem}")


def _problems(engine, backend, compile_config, compile_kwargs, schedule, use_z2):
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        yield f"torch {torch.__version__} is too old; install torch {OLDEST_TORCH} or newer"
    yield from _unsupported_optimizers(engine)
    yield from _unsupported_engines(engine)
    yield from _unsupported_zero_options(engine)
    yield from _unsupported_compile_options(compile_config)
    yield from _unsupported_compile_kwargs(backend, compile_kwargs)
    stage_pass = zero_1_and_2_compile.add_z2_reduce if use_z2 else zero_1_and_2_compile.add_z1_reduce
    if schedule is not None and schedule != [(0, [stage_pass])]:
        name = zero_1_and_2_compile.NAME_Z2 if use_z2 else zero_1_and_2_compile.NAME_Z1
        yield (
            f"`schedule` may only be [(0, ['{name}'])], because gradients are handled before the graphs that "
            "scheduled passes rewrite exist; leave `schedule` out"
        )


def _unsupported_optimizers(engine):
    optimizer = engine.optimizer
    if type(optimizer) is DeepSpeedZeroOptimizer:
        inner = type(optimizer.optimizer).__name__
        if "muon" in inner.lower():
            yield f"optimizer {inner} needs whole gradients, which no rank holds; use another optimizer or no DeepCompile"
        return
    name = type(optimizer).__name__
    if name == "BF16_Optimizer":
        yield (
            "data_types.grad_accum_dtype='fp32' with bf16 is not supported in stage 1; use stage 2, which "
            "accumulates in fp32, or grad_accum_dtype='bf16'"
        )
    elif "ZenFlow" in name:
        yield "zero_optimization.zenflow is not supported; remove it"
    else:
        yield f"optimizer wrapper {name} is not supported"


def _unsupported_engines(engine):
    config = engine._config
    if engine.has_moe_layers:
        yield "mixture-of-experts layers, whose experts have process groups of their own, are not supported"
    if getattr(engine, "pipeline_parallelism", False):
        yield "pipeline parallelism is not supported"
    if engine.autotp_size() > 1:
        yield "tensor_parallel.autotp_size > 1 is only supported with the 'autotp' pass (compile.passes)"
    if engine.sequence_parallel_size > 1:
        yield "sequence parallelism is only supported with the 'autosp' pass (compile.passes)"
    if config.prescale_gradients:
        yield "prescale_gradients=true is not supported; gradients are averaged inside the collective: set it to false"
    if config.gradient_predivide_factor != 1.0:
        yield "gradient_predivide_factor is not supported; gradients are averaged inside the collective: remove it"


def _unsupported_zero_options(engine):
    zero_config = engine._config.zero_config
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(zero_config, name)
        if offload is not None and offload.device != OffloadDeviceEnum.none:
            yield f"zero_optimization.{name} is not supported; remove it or use stage 3"
    if not zero_config.reduce_scatter:
        yield (
            "zero_optimization.reduce_scatter=false asks for all-reduce, but each gradient is reduced to its owner "
            "only; remove it"
        )
    if zero_config.zero_quantized_gradients:
        yield "zero_optimization.zero_quantized_gradients is not supported; remove it"
    if zero_config.leaf_module.model_fields_set:
        yield "zero_optimization.leaf_module is an option of stage 3; remove it"


def _unsupported_compile_options(compile_config):
    for name, neutral in _ZERO3_ONLY.items():
        if getattr(compile_config, name) != neutral:
            yield f"compile.{name}={getattr(compile_config, name)} is implemented for ZeRO stage 3 only; remove it"
    if "free_activation_threshold" in compile_config.model_fields_set:
        yield "compile.free_activation_threshold is implemented for ZeRO stage 3 only; remove it"
    for name in compile_config.passes or ():
        if name != "z1":
            yield f"compile.passes holds '{name}', which does not go with this stage; use ['z1'] or leave it out"


def _unsupported_compile_kwargs(backend, compile_kwargs):
    from torch._inductor import config, list_mode_options

    mode, options = compile_kwargs.get("mode"), compile_kwargs.get("options") or {}
    if backend == "eager" and (mode or options):
        yield "`mode` and `options` of compile_kwargs go with backend 'inductor', not 'eager'; remove them"
        return
    patches = {**(list_mode_options(mode) if mode else {}), **options}
    if patches.get("triton.cudagraphs", config.triton.cudagraphs):
        yield (
            "CUDA graphs (compile_kwargs mode 'reduce-overhead' or 'max-autotune', or option triton.cudagraphs) "
            "cannot record reductions that are decided at run time; use mode 'max-autotune-no-cudagraphs' or none"
        )
