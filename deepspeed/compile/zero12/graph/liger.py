# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps those of Liger's kernels out of graphs that compiled code calls wrongly.

Such a kernel runs as it does without torch.compile. What is around it stays compiled, and so do Liger's other kernels.
"""

import functools
import sys

import torch
from torch.nn import Module

from ..messages import warn

# The autograd functions with which liger-kernel 0.8.5 and torch 2.11 go wrong in graphs, with torch.compile alone too.
# Torch cannot analyse the kernels of RMSNorm, and takes every input for changed: gradients are wrong, or memory of
# others is read. The fused loss is wrong where a label is ignored. tests/test_liger.py fails for one that was mended.
_FUNCTIONS = (
    ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
    ("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"),
)


def keep_out_of_graphs(module: Module) -> None:
    """Has Dynamo leave these functions out, in this process from then on, if a model calls Liger's code."""
    if any((getattr(each.forward, "__module__", None) or "").startswith("liger_kernel.") for each in module.modules()):
        for file, name in _FUNCTIONS:
            _keep_out(file, name)


@functools.cache
def _keep_out(file, name):
    function = getattr(sys.modules.get(file), name, None)
    if function is not None:
        why = "it computes wrong numbers there with this torch and this Liger"
        # Dynamo breaks the graph at a call of the function, and compiles nothing of what the call runs.
        function.forward = staticmethod(torch.compiler.disable(function.forward, reason=why))
        warn(f"DeepCompile keeps {name} out of its graphs, because {why}")
