# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes Dynamo trace adapters of peft on parameters (``target_parameters``), such as the weights of all experts.

To peft: ``ParamWrapper`` registers a parametrization in each forward and removes it again. This makes a new class and
a new parameter each time, so under ``torch.compile`` each step compiles the layer anew. Please put the adapted weight
into ``module._parameters`` for the call, as ``torch.func.functional_call`` does.
"""

import contextlib
import functools
import sys

import torch

from ..base.subclasses import is_dtensor


def trace_adapted_parameters() -> None:
    """Changes how these adapters are applied for the rest of the process, if peft has been imported."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    wrapper = getattr(layers, "ParamWrapper", None)
    if hasattr(wrapper, "_activate_lora"):
        _substitute(wrapper, getattr(layers, "UPCAST_DTYPES", ()))


@functools.cache
def _substitute(wrapper, stored_low):
    original = wrapper._activate_lora

    @functools.wraps(original)
    def activate(self, active_adapters):
        adapters = [adapter for adapter in active_adapters if adapter in self.lora_A]
        parameter = self.get_param()
        # peft adds to weights of these formats in another dtype.
        is_low = any(getattr(torch, name, None) == parameter.dtype for name in stored_low)
        # ZeRO-3 looks for its parameters in the layer, and FSDP2 puts its own into the layer.
        is_sharded = hasattr(parameter, "ds_id") or is_dtensor(parameter)
        if adapters and not is_low and not is_sharded:
            return _adapted(self, adapters)
        return original(self, active_adapters)

    wrapper._activate_lora = activate


@contextlib.contextmanager
def _adapted(wrapper, adapters):
    """Within it the layer that ``wrapper`` adapts has the adapted weight in the place of its parameter."""
    parameters, name = wrapper.get_base_layer()._parameters, wrapper.parameter_name
    parameter = parameters[name]
    parameters[name] = _adapted_weight(wrapper, adapters, parameter)
    try:
        yield
    finally:
        parameters[name] = parameter


def _adapted_weight(wrapper, adapters, parameter):
    """Adds in the order in which peft adds, so that sums round alike."""
    if len(adapters) == 1 and wrapper.num_experts > 1 and hasattr(wrapper, "get_delta_factors"):
        left, right, scaling = wrapper.get_delta_factors(adapters[0])
        # Autocast would make the weight's dtype that of its matrix products.
        with torch.autocast(parameter.device.type, enabled=False):
            return torch.baddbmm(parameter, left, right, alpha=scaling)
    deltas = [wrapper.get_delta_weight(adapter) for adapter in adapters]
    return parameter + functools.reduce(torch.add, deltas)
