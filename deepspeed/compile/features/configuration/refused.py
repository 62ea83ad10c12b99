# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Refuses options with which ZeRO-1 and ZeRO-2 under DeepCompile would not train as the user asked.

Also refuses calls of ``engine.compile()`` that would lose gradients, or whose graphs would reduce none or wrong ones.
"""

import inspect
from typing import TYPE_CHECKING, Iterator, Set, get_origin

import torch
from torch.nn import Embedding, EmbeddingBag, Module
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import deepspeed.comm as dist
from deepspeed.compile.passes import zero_1_and_2_compile
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from ...zero_1_and_2.feature import Request
from ...zero_1_and_2.graph.backend import patches_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# Options with which graphs cannot reduce gradients. Some modes set them.
_OF_OTHER_GRAPHS = {"triton.cudagraphs", "selective_decompose"}
_LAYERS_OF_EXPERTS = (MoE, AutoEPMoELayer)


def refused(request: Request) -> Iterator[str]:
    """Yields a sentence for each option that cannot be honoured."""
    yield from _unsupported_parallelism(request)
    yield from _unsupported_parameters(request)
    yield from _unsupported_engines(request.engine)
    yield from _unsupported_compile_kwargs(request.backend, request.compile_kwargs)
    # Before the parts refuse their own options, because these name other remedies.
    yield from _unsupported_with_experts(request)


def _unsupported_parallelism(request):
    """Yields a sentence for each kind of parallelism that reduces gradients in another way."""
    engine = request.engine
    if getattr(engine, "pipeline_parallelism", False):
        yield "pipeline parallelism is not supported; set compile.deepcompile to false"
    if engine.autotp_size() > 1:
        yield (
            f"tensor_parallel.autotp_size={engine.autotp_size()} is only supported with the pass 'autotp'; set "
            "compile.passes to ['autotp']"
        )
    if engine.mpu is None and groups.mpu is not None and groups._get_sequence_parallel_world_size() > 1:
        yield (
            "an earlier engine's mpu makes ranks share sequences, and this engine was given none; give "
            "deepspeed.initialize() that mpu, or set deepspeed.utils.groups.mpu to None"
        )
    # An earlier engine's mesh is used by later ones, which have none.
    mesh = engine.mesh_device or groups.mesh_device
    ranks = 1 if mesh is None else mesh["sequence_parallel"].size()
    if ranks > 1:
        yield (
            f"a mesh has {ranks} ranks for a sequence, over which DeepSpeed reduces no gradients; give "
            "deepspeed.initialize() an mpu in its place, such as UlyssesSPAttentionHF.register_with_transformers() "
            "returns, or set compile.passes to ['autosp'] and use stage 1"
        )


def _unsupported_parameters(request):
    module, trained = request.engine.module, {id(parameter) for parameter in request.trained}
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id"):
            yield (
                f"parameter {name} is partitioned by deepspeed.zero.Init(), which is for stage 3; make the model "
                "without it"
            )
        if id(parameter) in trained and parameter.is_complex():
            yield (
                f"parameter {name} is complex, and DeepSpeed's fp32 master weights lose the imaginary part; make it "
                "real, with a last dimension of two, and call torch.view_as_complex() in the forward"
            )
        if id(parameter) in trained and is_traceable_wrapper_subclass(parameter):
            yield (
                f"parameter {name} is trained and made of other tensors ({type(parameter).__name__}), which no "
                "step of ZeRO-1 and ZeRO-2 changes; set its requires_grad to false, or make it a plain tensor"
            )
    for name, submodule in module.named_modules():
        if isinstance(submodule, (Embedding, EmbeddingBag)) and submodule.sparse and id(submodule.weight) in trained:
            yield (
                f"the gradient of {name or type(submodule).__name__} is sparse, and DeepCompile reduces dense ones "
                "only; build the module with sparse=False"
            )


def _unsupported_engines(engine):
    if engine._config.zero_config.zenflow is not None:
        yield "zero_optimization.zenflow is not supported; remove it"
    offload = engine._config.zero_config.offload_optimizer
    if offload is not None and offload.device == OffloadDeviceEnum.nvme:
        yield "zero_optimization.offload_optimizer.device='nvme' is only supported in stage 3; use 'cpu'"
    if engine.zero_cpu_offload() and offload.super_offload:
        yield "zero_optimization.offload_optimizer.super_offload is only supported in stage 3; leave it out"
    accumulates_apart = engine.get_data_types() == (torch.bfloat16, torch.float32) and not engine.zero_cpu_offload()
    if accumulates_apart and engine.zero_optimization_stage() == 1:
        # DeepSpeed has another optimizer for that.
        yield (
            "data_types.grad_accum_dtype='fp32' with bf16 is not supported in stage 1; use stage 2, which accumulates "
            "in fp32, or grad_accum_dtype='bf16'"
        )
    autocasts = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16
    if autocasts and not engine.zero_compute_grad_norm() and dist.get_world_size() > 1:
        yield (
            "zero_optimization.compute_grad_norm=false lets each rank decide by itself whether torch_autocast in fp16 "
            "skips a step; leave it out, or set torch_autocast.dtype to bfloat16"
        )
    if engine._config.compile_config.autoep_non_moe:
        yield (
            "compile.autoep_non_moe=true compiles without DeepCompile; leave it out, or set compile.deepcompile to "
            "false"
        )
    if engine._config.hybrid_engine.enabled:
        yield (
            "hybrid_engine.enabled=true is not supported, because generation swaps the modules that were compiled; "
            "set it to false"
        )
    if engine.random_ltd_enabled():
        yield (
            "data_efficiency.data_routing.random_ltd is not supported, because its layers load native code and change "
            "their shapes inside of what is compiled; set random_ltd.enabled to false"
        )
    if engine.autotuning_enabled():
        yield (
            "autotuning.enabled=true is not supported, because compiled code does not call the functions that the "
            "flops profiler counts for it; set it to false, or set compile.deepcompile to false"
        )


def _unsupported_compile_kwargs(backend, compile_kwargs):
    from torch._inductor import config, list_mode_options

    # Accept `backend` among the arguments: DeepSpeed itself warns of it.
    known = {*inspect.signature(torch.compile).parameters} - {"model"}
    for name in compile_kwargs:
        if name not in known:
            yield f"compile_kwargs['{name}'] is not an argument of this torch's torch.compile(); remove it"
    limit = compile_kwargs.get("recompile_limit")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        yield f"compile_kwargs['recompile_limit']={limit!r} is not a number of compilations; set it to 1 or more"
    dynamic = compile_kwargs.get("dynamic")
    if dynamic not in (None, True, False):
        yield f"compile_kwargs['dynamic']={dynamic!r} is neither true nor false; set it to one of them, or to None"
    mode, options = compile_kwargs.get("mode"), compile_kwargs.get("options")
    if mode is not None and options is not None:
        yield "compile_kwargs holds both `mode` and `options`, but torch.compile takes one of them; remove either"
    if not isinstance(options, (dict, type(None))):
        asked = f"compile_kwargs['options']={options!r}"
        yield f"{asked} is not a dict of torch.compile's options; pass one, or leave it out"
        return
    mode, options = None if mode == "default" else mode, dict(options or {})
    # guard_filter_fn is an option of Dynamo and goes with any backend.
    options.pop("guard_filter_fn", None)
    if backend == "eager":
        if mode or options:
            yield "`mode` and `options` of compile_kwargs go with backend 'inductor', not 'eager'; remove them"
        return
    if mode is not None and mode not in list_mode_options():
        # Leave out modes that another check refuses.
        usable = [name for name, patches in list_mode_options().items() if not _OF_OTHER_GRAPHS & patches.keys()]
        yield f"compile_kwargs['mode']={mode!r} is not a mode of torch.compile; use one of {usable}"
        return
    for name, value in options.items():
        # As torch does with each name.
        attribute = str(name).replace("-", "_")
        if attribute not in config.get_config_copy():
            yield f"compile_kwargs['options'] holds '{name}', which is not an option of this torch; remove it"
            continue
        # As torch does, pass over types that isinstance() does not take.
        taken = config.get_type(attribute)
        if isinstance(taken, type) and get_origin(taken) is None and not isinstance(value, taken):
            yield (
                f"compile_kwargs['options'] holds '{name}' with the value {value!r}, which is not of type "
                f"{taken.__name__}; give it such a value, or remove it"
            )


def _unsupported_with_experts(request):
    """Yields a sentence for each option that experts with process groups of their own cannot have."""
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
        yield (
            "Muon is not supported with experts, which have process groups of their own; use AdamW, or set "
            "compile.deepcompile to false"
        )
    # Gradients of such experts are sent nowhere, but would wait in buckets of all ranks for the host.
    groups = () if engine.optimizer is None else engine.optimizer.real_dp_process_group
    if engine.zero_cpu_offload() and 1 in map(dist.get_world_size, groups) and dist.get_world_size() > 1:
        yield (
            "zero_optimization.offload_optimizer is not supported where each expert lies on one rank; leave it "
            "out, or use fewer ranks for the experts"
        )


def layers_of(module: Module) -> Set[type]:
    """Returns the classes of the layers of experts in a module."""
    return {type(layer) for layer in module.modules() if isinstance(layer, _LAYERS_OF_EXPERTS)}


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
    from torch._inductor import config

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
    patches = patches_of(request.compile_kwargs.get("mode"), request.compile_kwargs.get("options"))
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
