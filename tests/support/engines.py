# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine and a plain loop on the same batches, for the tests of several engines and of an engine's end.

Runs in the processes of ``support.pool``.
"""

import copy
from typing import NamedTuple

import torch.distributed as dist

from deepspeed.utils import safe_get_full_fp32_param

from support.training import (
    BOUND,
    average_gradients,
    batch,
    build,
    make_engine,
    make_optimizer,
    relative_error,
    total_error,
)

# How far master parameters may be from those of a plain loop in fp32, relative to these, where an engine computes in
# this format. The roundings of several steps add up: bf16 has 8 bits.
CLOSE_TO_FP32 = {"fp32": BOUND, "bf16": 3e-2}
OVERLAPPED = {"compile": {"overlap_param_gather": True}}


class Errors(NamedTuple):
    """Relative errors of parameters against those of a plain loop."""

    worst: float  # the largest of one parameter
    total: float  # of all together


class Beside:
    """An engine and a plain loop on the same batches."""

    def __init__(self, case, seed=0, module=None):
        self.case = case
        self.module = module or build(case, seed)
        self.plain = copy.deepcopy(self.module)
        self.before = copy.deepcopy(self.module)
        self.engine = make_engine(self.module, case)
        self.optimizer = make_optimizer(self.plain, case)

    def step(self, step):
        for micro_step in range(self.case.accumulation):
            ids = batch(step, micro_step, dist.get_rank(), 4)
            self.engine.backward(self.engine(ids))
            self.engine.step()
            (self.plain(ids) / self.case.accumulation).backward()
        self.plain_step()

    def plain_step(self):
        average_gradients(self.plain)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self):
        """Destroys the engine; returns the errors of its master parameters."""
        masters = [safe_get_full_fp32_param(parameter) for parameter in self.module.parameters()]
        expected = list(self.plain.parameters())
        self.engine.destroy()
        return Errors(relative_error(masters, expected), total_error(masters, expected))


def check(results, cases):
    """Asserts that each engine of each rank trained as its plain loop. A result lists the errors of each case."""
    for result in results:
        for errors, case in zip(result, cases, strict=True):
            assert (errors.worst if case.dtype == "fp32" else errors.total) < CLOSE_TO_FP32[case.dtype]


def check_one(results, case):
    """Does the same where the result of a rank is the errors of one engine."""
    check([[errors] for errors in results], [case])
