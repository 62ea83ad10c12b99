# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Checks an engine's options for DeepCompile ZeRO-1/2.

:func:`check_options` refuses an option if the engine would train in another way, or in other memory, than the user
asked for, and warns of an option that DeepSpeed 0.19.8 accepts in these stages and ignores. Each error and warning is
one sentence. ``docs/options.md`` lists every option with what happens to it.
"""

import inspect
import itertools
from typing import TYPE_CHECKING, Dict, List, Optional, Tuple

import torch
from torch.torch_version import TorchVersion

from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer

from ...passes import zero_1_and_2_compile
from ..feature import Request, classes
from ..messages import warn
from .state import state_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

OLDEST_TORCH = "2.11"

# Options that only ZeRO-3 implements: section -> name -> the values that switch the option off. Options that merely
# tune ZeRO-3 (sizes, thresholds) cause no warning: users leave them in a configuration when they change the stage.
_ZERO3_ONLY: Dict[str, Dict[str, Tuple]] = {
    "zero_optimization": {
        "zero_quantized_weights": (False,),
        "zero_quantized_nontrainable_weights": (False,),
        "zero_quantized_gradients": (False,),
        "zero_hpz_partition_size": (0, 1),
    },
    "compile": {
        "offload_activation": (False,),
        "offload_opt_states": (False,),
        "offload_parameters": (False,),
        "symmetric_memory": (False,),
        "sync_before_allgather": (False,),
        "sync_after_allgather": (False,),
        "free_activation": (False,),
        "keep_int_input_tensors": (True,),
        "keep_all_input_tensors": (False,),
    },
}


def check_options(request: Request, schedule: Optional[List]) -> None:
    """Checks the options of an engine, which stays as it is, and warns of each that has no effect in this stage.

    ``schedule``: as in ``set_up()``.

    Raises:
        ValueError: for the first option that cannot be honoured.
    """
    refuse_options(request, schedule)
    for ignored in itertools.chain(_without_effect(request), *(cls.warnings(request) for cls in classes())):
        warn(_beginning(request.engine) + ignored)


def refuse_options(request: Request, schedule: Optional[List]) -> None:
    """Checks the options of an engine. ``schedule``: as in ``set_up()``.

    Raises:
        ValueError: for the first option that cannot be honoured.
    """
    for problem in _problems(request, schedule):
        raise ValueError(_beginning(request.engine) + problem)


def _beginning(engine):
    return f"DeepCompile with ZeRO stage {engine.zero_optimization_stage()}: "


def overlaps_reduction(request: Request) -> bool:
    """Whether buckets may travel while the backward goes on: unless ``overlap_comm`` or ``double_buffer`` is false."""
    # The parsed section cannot tell "false" from "not given": its validator sets the field in both cases.
    section = request.engine._config._param_dict.get("zero_optimization")
    asked_not_to = isinstance(section, dict) and section.get("overlap_comm") is False
    return request.options.double_buffer and not asked_not_to


def _problems(request, schedule):
    """Yields a sentence for each option that cannot be honoured."""
    engine = request.engine
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        yield f"torch {torch.__version__} is too old; install torch {OLDEST_TORCH} or newer"
    if torch.nn.functional.linear is zero3_linear_wrap and TorchVersion(torch.__version__) < "2.13":
        # ZeRO-3 puts it there for the life of a process.
        yield (
            "an engine of ZeRO-3 in this process has replaced torch.nn.functional.linear, and torch "
            f"{torch.__version__} compiles the replacement to gradients of zero; set zero_optimization."
            "memory_efficient_linear to false for that engine, or torch.nn.functional.linear to torch._C._nn.linear "
            "before this one compiles, or install torch 2.13 or newer"
        )
    yield from _unsupported_parameters(engine.module)
    yield from _unsupported_zero_options(engine)
    yield from _unsupported_engines(engine)
    yield from _unsupported_optimizers(engine)
    yield from _unsupported_reports(engine)
    yield from itertools.chain.from_iterable(cls.refusals(request) for cls in classes())
    yield from _unsupported_compile_kwargs(request.backend, request.compile_kwargs)
    if engine.zero_optimization_stage() == 2:
        name, own_pass = zero_1_and_2_compile.NAME_Z2, zero_1_and_2_compile.add_z2_reduce
    else:
        name, own_pass = zero_1_and_2_compile.NAME_Z1, zero_1_and_2_compile.add_z1_reduce
    if schedule is not None and schedule != [(0, [own_pass])]:
        yield (
            f"`schedule` may only be [(0, ['{name}'])], because gradients are handled before the graphs that "
            "scheduled passes rewrite exist; leave `schedule` out"
        )
    if has_gradients(engine):
        yield (
            "gradients computed before engine.compile() would be lost; call it before the first backward or after "
            "engine.step() at the gradient accumulation boundary"
        )


def _unsupported_parameters(module):
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            yield (
                f"parameter {name} is complex, and DeepSpeed's fp32 master weights lose the imaginary part; make it "
                "real, with a last dimension of two, and call torch.view_as_complex() in the forward"
            )


def _unsupported_zero_options(engine):
    zero_config = engine._config.zero_config
    if zero_config.zenflow is not None:
        yield "zero_optimization.zenflow is not supported; remove it"


def _without_effect(request):
    """Yields a sentence for each option that DeepSpeed 0.19.8 accepts in these stages and ignores."""
    engine, compile_config, compile_kwargs = request.engine, request.options, request.compile_kwargs
    config = engine._config
    zero_config = config.zero_config
    offload = zero_config.offload_param
    if offload is not None and offload.device != OffloadDeviceEnum.none:
        written = "cpu_offload_param" if "cpu_offload_param" in zero_config.model_fields_set else "offload_param"
        yield f"zero_optimization.{written} has no effect in this stage, only in stage 3"
    for section, values in (("zero_optimization", zero_config), ("compile", compile_config)):
        for name, harmless in _ZERO3_ONLY[section].items():
            value = getattr(values, name)
            if value not in harmless:
                yield f"{section}.{name}={value} has no effect in this stage, only in stage 3"
    if "z3" in (compile_config.passes or ()):
        yield "compile.passes holds 'z3', which has no effect in this stage"
    # With prescale_gradients, DeepSpeed itself does not read the factor.
    if config.gradient_predivide_factor != 1.0 and not config.prescale_gradients:
        yield (
            f"gradient_predivide_factor={config.gradient_predivide_factor} has no effect, because gradients are "
            "divided by the number of ranks before they are summed"
        )
    if engine.flops_profiler_enabled():
        yield (
            "flops_profiler.enabled=true has no effect, because compiled code does not call the functions that the "
            "flops profiler counts; profile without engine.compile()"
        )
    if config.comms_config.comms_logger_enabled and config.comms_config.comms_logger.enabled:
        yield (
            "comms_logger.enabled=true has no effect on the reductions of gradients, which the log leaves out; use "
            "torch.profiler for those"
        )
    if compile_kwargs.get("name"):
        yield "compile_kwargs['name'] has no effect, because torch gives it to its own backend only"


def _unsupported_engines(engine):
    config = engine._config
    if getattr(engine, "pipeline_parallelism", False):
        yield "pipeline parallelism is not supported; set compile.deepcompile to false"
    marked = any(group.get("moe") for group in getattr(engine.optimizer, "param_groups", ()))
    if engine.has_moe_layers or marked or any(map(is_moe_param, engine.module.parameters())):
        yield (
            "mixture-of-experts layers, whose experts have process groups of their own, are not supported; "
            "set compile.deepcompile to false"
        )
    if engine.autotp_size() > 1:
        yield (
            f"tensor_parallel.autotp_size={engine.autotp_size()} is only supported with the pass 'autotp'; set "
            "compile.passes to ['autotp']"
        )
    if engine.sequence_parallel_size > 1:
        yield (
            f"sequence parallelism over {engine.sequence_parallel_size} ranks is only supported with the pass "
            "'autosp'; set compile.passes to ['autosp'] and use stage 1"
        )
    if config.hybrid_engine.enabled:
        yield (
            "hybrid_engine.enabled=true is not supported, because generation swaps the modules that were compiled; "
            "set it to false"
        )


def _unsupported_optimizers(engine):
    optimizer = engine.optimizer
    if type(optimizer) is DeepSpeedZeroOptimizer:
        return
    name = type(optimizer).__name__
    if name == "BF16_Optimizer":
        yield (
            "data_types.grad_accum_dtype='fp32' with bf16 is not supported in stage 1; use stage 2, which "
            "accumulates in fp32, or grad_accum_dtype='bf16'"
        )
    elif state_of(engine) is not None:
        yield "an earlier engine.compile() failed half-way; create the engine anew"
    else:
        yield f"optimizer wrapper {name} is not supported; set compile.deepcompile to false"


def _unsupported_reports(engine):
    """Yields a sentence for random_ltd, whose layers change shapes, and for autotuning, which needs a profiler."""
    if engine.random_ltd_enabled():
        yield (
            "data_efficiency.data_routing.random_ltd is not supported, because its layers load native code and change "
            "their shapes inside of what is compiled; set random_ltd.enabled to false"
        )
    if engine.autotuning_enabled():
        yield (
            "autotuning.enabled=true is not supported, because compiled code does not call the functions that the "
            "flops profiler counts for it; set it to false or tune without engine.compile()"
        )


def _unsupported_compile_kwargs(backend, compile_kwargs):
    from torch._inductor import config, list_mode_options

    # Accept `backend` among the arguments: DeepSpeed itself warns of it.
    known = {*inspect.signature(torch.compile).parameters} - {"model"}
    for name in compile_kwargs:
        if name not in known:
            yield f"compile_kwargs['{name}'] is not an argument of this torch's torch.compile(); remove it"
    mode, options = compile_kwargs.get("mode"), compile_kwargs.get("options")
    if mode is not None and options is not None:
        yield "compile_kwargs holds both `mode` and `options`, of which torch.compile takes one; remove either"
    mode, options = None if mode == "default" else mode, dict(options or {})
    # guard_filter_fn is an option of Dynamo and goes with any backend.
    options.pop("guard_filter_fn", None)
    if backend == "eager":
        if mode or options:
            yield "`mode` and `options` of compile_kwargs go with backend 'inductor', not 'eager'; remove them"
        return
    if mode is not None and mode not in list_mode_options():
        yield f"compile_kwargs['mode']='{mode}' is not a mode of torch.compile; use one of {[*list_mode_options()]}"
        return
    for name in options:
        if name not in config.get_config_copy():
            yield f"compile_kwargs['options'] holds '{name}', which is not an option of this torch; remove it"
    patches = {**(list_mode_options(mode) if mode else {}), **options}
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
        # They are on the host. What a rank holds there depends on its partition, and all ranks must answer alike.
        return True
    held = [*optimizer.averaged_gradients.values(), *optimizer.all_grad_tensors.values()]
    for group in optimizer.bit16_groups:
        held += [gradient for parameter in group for gradient in (parameter.grad, parameter.grad_accum)]
    return any(gradient is not None for gradient in held)
