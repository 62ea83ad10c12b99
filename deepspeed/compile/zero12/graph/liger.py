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

# Files of kernels with which liger-kernel 0.8.5 and torch 2.11 go wrong in graphs, with torch.compile alone too. The
# backward of RMSNorm reads other memory or gives wrong gradients. The fused loss is wrong where a label is ignored.
# tests/test_liger.py fails for a file that has become right.
FILES = ("liger_kernel.ops.rms_norm", "liger_kernel.ops.fused_linear_cross_entropy")


def keep_out_of_graphs(module: Module) -> None:
    """Has Dynamo leave out the files if a model calls Liger's code, in this process from then on."""
    if any((getattr(each.forward, "__module__", None) or "").startswith("liger_kernel.") for each in module.modules()):
        for name in FILES:
            _leave_out(name)


@functools.cache
def _leave_out(name):
    if name in sys.modules:
        torch._dynamo.trace_rules.add(name)
        warn(f"DeepCompile keeps {name} out of its graphs, in which it would compute wrong numbers")
