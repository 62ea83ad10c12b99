# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes Dynamo trace peft's DoRA, whose function for quantized weights would end a graph in every adapted layer.

The function reads ``type(weight).__module__``, which Dynamo cannot trace for torch's own types.
"""

import functools
import sys
import types

import torch

from ...zero_1_and_2.feature import Feature, Request, SetUpContext


class Dora(Feature):
    """Makes Dynamo trace unquantized weights for the rest of the process, if peft has been imported."""

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return isinstance(_function(), types.FunctionType)

    def __init__(self, context: SetUpContext):
        _substitute(_function())


FEATURE = Dora


def _function():
    return getattr(sys.modules.get("peft.utils.integrations"), "dequantize_module_weight", None)


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
