# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine and a plain loop on the same batches, for the tests of several engines and of an engine's end.

Runs in the processes of ``support.pool``.
"""

from typing import NamedTuple

import torch.distributed as dist

from deepspeed.utils import safe_get_full_fp32_param

from support.beside import Beside
from support.training import BOUND, batch, build, relative_error, total_error, train_plain

# How far master parameters may be from those of a plain loop in fp32, relative to these, where an engine computes in
# this format. The roundings of several steps add up: bf16 has 8 bits.
CLOSE_TO_FP32 = {"fp32": BOUND, "bf16": 3e-2}
OVERLAPPED = {"compile": {"overlap_param_gather": True}}


class Errors(NamedTuple):
    """Relative errors of parameters against those of a plain loop."""

    worst: float  # the largest of one parameter
    total: float  # of all together


class CaseBeside(Beside):
    """Trains the model of a case, or another module in its place, on micro-batches that the step's number determines.

    Torch forgets nothing that it has compiled, because a test makes several of these in one process.
    """

    def __init__(self, case, seed=0, module=None):
        super().__init__(module or build(case, seed), case, reset=False)

    def step(self, step):
        for micro_step in range(self.case.accumulation):
            self.micro_batch(batch(step, micro_step, dist.get_rank(), 4))
        self.step_plain()

    def train_plain(self, step):
        """A step of the plain loop alone."""
        train_plain(self.plain, self.optimizer, step, self.case.accumulation)

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
