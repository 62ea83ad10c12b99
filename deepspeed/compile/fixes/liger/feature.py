# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps those of Liger's kernels out of graphs that compiled code calls wrongly.

Such a kernel runs as without torch.compile. The code around it and Liger's other kernels stay compiled.
"""

import functools
import importlib
import sys

import torch

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.messages import warn

# The autograd functions with which liger-kernel 0.8.5 and torch 2.11 go wrong in graphs, with torch.compile alone too.
# Torch cannot analyse the kernels of RMSNorm, and takes every input for changed: gradients are wrong, or kernels read
# foreign memory. test_liger.py fails once that is fixed. The fused loss of a model was wrong in some steps.
_FUNCTIONS = (
    ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
    ("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"),
)


class Liger(Feature):
    """Makes Dynamo leave these functions out for the rest of the process, if Liger has been imported."""

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return "liger_kernel" in sys.modules

    def __init__(self, context: SetUpContext):
        for file, name in _FUNCTIONS:
            _keep_out(file, name)


FEATURE = Liger


@functools.cache
def _keep_out(file, name):
    try:
        function = getattr(importlib.import_module(file), name)
    except (ImportError, AttributeError):
        warn(f"This Liger has no {name}, which DeepCompile keeps out of graphs; compare losses with Liger turned off")
        return
    forward = function.forward

    # Dynamo breaks the graph at a call of the function, and compiles nothing within the call.
    @torch.compiler.disable(reason="it computes wrong numbers in graphs")
    @functools.wraps(forward)
    def outside(*args):
        _say(name)
        return forward(*args)

    function.forward = staticmethod(outside)


@functools.cache
def _say(name):
    warn(f"DeepCompile keeps {name} out of its graphs, where that of liger-kernel 0.8.5 computes wrong numbers")
