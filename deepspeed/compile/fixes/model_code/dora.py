# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes Dynamo trace peft's DoRA.

To peft: ``dequantize_module_weight()`` reads ``type(weight).__module__``, which Dynamo cannot trace for torch's own
types. The read ends a graph in every adapted layer, even if no weight is quantized. Please return a plain
``Parameter`` before that read.
"""

import functools
import sys
import types

import torch


def trace_unquantized_weights() -> None:
    """Makes Dynamo trace unquantized weights for the rest of the process, if peft has been imported."""
    function = getattr(sys.modules.get("peft.utils.integrations"), "dequantize_module_weight", None)
    if isinstance(function, types.FunctionType):
        _substitute(function)


@functools.cache
def _substitute(function):
    # Call a copy: Dynamo would replace a call of the function itself by the traced substitute.
    original = types.FunctionType(function.__code__, function.__globals__, closure=function.__closure__)

    def traced(module):
        if type(module.weight) is torch.nn.Parameter and not hasattr(module, "W_q"):
            return module.weight
        return original(module)

    try:
        torch.compiler.substitute_in_graph(function)(traced)
    except (TypeError, ValueError):
        # The function of another peft has other arguments, or a substitute already.
        return
