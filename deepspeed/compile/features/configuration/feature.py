# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Refuses, or warns of, DeepSpeed's own options and arguments of ``engine.compile()``."""

from typing import Dict, Iterator, Tuple

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from .refused import refused, refused_calls

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


class UnsupportedOptions(Feature):
    """Refuses and warns of options of DeepSpeed. Other parts do so for their own options."""

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        yield from refused(request)
        if request.is_call:
            yield from refused_calls(request)

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        return _ignored(request)

    def __init__(self, context: SetUpContext):
        # Turn the flops profiler off: on one rank it would replace functions that the compiler traces.
        profiler = context.engine._config.flops_profiler_config
        context.undo.callback(setattr, profiler, "enabled", profiler.enabled)
        profiler.enabled = False


FEATURE = UnsupportedOptions


def _ignored(request):
    """Yields a sentence for each option that DeepSpeed 0.19.8 accepts in ZeRO-1 and ZeRO-2, and ignores."""
    engine, compile_config, compile_kwargs = request.engine, request.options, request.compile_kwargs
    config = engine._config
    zero_config = config.zero_config
    offload = zero_config.offload_param
    if offload is not None and offload.device != OffloadDeviceEnum.none:
        written = "cpu_offload_param" if "cpu_offload_param" in zero_config.model_fields_set else "offload_param"
        yield f"zero_optimization.{written} has no effect in this stage, only in stage 3"
    if engine.zero_cpu_offload() and not zero_config.ignore_unused_parameters:
        yield (
            "zero_optimization.ignore_unused_parameters=False has no effect, because a parameter without a gradient "
            "is stepped on zeros"
        )
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
            "flops_profiler.enabled=true has no effect, because compiled code does not call the functions that "
            "the flops profiler counts; profile with compile.deepcompile set to false"
        )
    if config.comms_config.comms_logger_enabled and config.comms_config.comms_logger.enabled:
        yield (
            "comms_logger.enabled=true has no effect on the reductions of gradients, which the log leaves out; "
            "use torch.profiler for those"
        )
    if compile_kwargs.get("name"):
        yield "compile_kwargs['name'] has no effect, because only torch's own backend uses it"
