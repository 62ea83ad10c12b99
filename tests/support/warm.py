# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Imported by the process from which ranks are forked: does what a process does when it first compiles.

Dynamo, AOT Autograd and Inductor import modules and fill tables, and Inductor asks the compiler what it can compile.
Each rank would take seconds for that, and ranks start anew whenever a test ends them or needs another number of them.
So would each rank that asks for the processor.
"""

from unittest import mock

import cpuinfo
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from tqdm import tqdm

from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

from support import processor  # noqa: F401


def compile_a_model() -> None:
    """Compiles a small model's forward and backward, and forgets the graphs."""
    for backend in ("aot_eager", "inductor"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        torch.compile(model, backend=backend)(torch.ones(2, 4)).sum().backward()
    torch._dynamo.reset()
    counters.clear()


# Without threads: processes that are forked have none of them. Inductor's would compile, tqdm's would watch its bars.
with config.patch(compile_threads=1), mock.patch.object(tqdm, "monitor_interval", 0):
    compile_a_model()
reducer_module()
cpuinfo.get_cpu_info()
