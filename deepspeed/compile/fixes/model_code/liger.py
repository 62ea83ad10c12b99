# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps those of Liger's kernels out of graphs that compiled code calls wrongly.

Such a kernel runs as without ``torch.compile``. The code around it and Liger's other kernels stay compiled.

To Liger: under ``torch.compile``, ``LigerRMSNorm`` has wrong gradients or reads foreign memory, because torch cannot
analyse its Triton kernels and takes every input for changed, and ``LigerFusedLinearCrossEntropy`` is wrong in some
steps (``docs/findings/liger_rms_norm.py``). Please make them custom operators that declare their mutations.
"""

import functools
import importlib
import sys

import torch

from ...zero_1_and_2.messages import warn

# The autograd functions with which liger-kernel 0.8.5 and torch 2.11 go wrong in graphs, with torch.compile alone too.
# test_liger.py fails once the norm is fixed.
_FUNCTIONS = (
    ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
    ("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"),
)


def keep_out_of_graphs() -> None:
    """Makes Dynamo leave these functions out for the rest of the process, if Liger has been imported."""
    for file, name in _FUNCTIONS if "liger_kernel" in sys.modules else ():
        _keep_out(file, name)


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
