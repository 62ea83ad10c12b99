# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they gather. Only on GPUs there are streams on which comparisons come late."""

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.shard_parameters.comparison import UNIT_ID_STRIDE, Comparison

from support.training import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU has no streams"),
]
# Of the device's clock: about a second, in which the host runs far ahead.
CYCLES = 2 * 10**9


def on_two_streams():
    """Gathers a unit for training on one stream, which is busy, and for an evaluation on another. Returns the first's
    numbers."""
    comparison = Comparison(7, "a block", dist.group.WORLD, device())
    training, evaluating = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(training):
        comparison.start()
        torch.cuda._sleep(CYCLES)
        comparison.wait()
    numbers = comparison._numbers
    with torch.cuda.stream(evaluating):
        comparison.start(comparison.at._replace(evaluates=True))
        comparison.wait()
    evaluating.synchronize()
    is_ahead = not training.query()
    torch.cuda.synchronize()
    return is_ahead, numbers.tolist()


def test_a_comparison_that_comes_late(ranks):
    """The next gather of the unit would overwrite what a stream has yet to compare, and the device would assert."""
    assert ranks(2).run(on_two_streams) == [(True, [2 * (7 * UNIT_ID_STRIDE + 7)] * 2)] * 2
