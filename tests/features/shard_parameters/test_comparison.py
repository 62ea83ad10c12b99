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
# Of the device's clock: the first is about a second, in which the host runs far ahead. Ranks that share GPUs with many
# others need more.
CYCLES = (2 * 10**9, 16 * 10**9, 64 * 10**9)
# What a rank sends in training, and the same negated.
NUMBER = 2 * (7 * UNIT_ID_STRIDE + 7)


def on_two_streams(cycles):
    """Gathers a unit for training on one stream, which is busy, and for an evaluation on another.

    Returns whether the evaluation was over while the first stream was busy, the first's numbers, and whether the
    second had memory of its own.
    """
    comparison = Comparison(7, "a block", dist.group.WORLD, device())
    training, evaluating = torch.cuda.Stream(), torch.cuda.Stream()
    # The first start of a kernel may wait for the device.
    for stream in (training, evaluating):
        with torch.cuda.stream(stream):
            comparison.start(comparison.at._replace(evaluates=stream == evaluating))
            comparison.wait()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.stream(training):
        torch.cuda._sleep(cycles)
        comparison.start()
        comparison.wait()
    numbers = comparison._numbers
    with torch.cuda.stream(evaluating):
        comparison.start(comparison.at._replace(evaluates=True))
        comparison.wait()
    evaluating.synchronize()
    is_ahead = not training.query()
    torch.cuda.synchronize()
    return is_ahead, numbers.tolist(), numbers.data_ptr() != comparison._numbers.data_ptr()


def test_a_comparison_that_comes_late(ranks):
    """The next gather of the unit would overwrite what a stream has yet to compare, and the device would assert. Or a
    comparison would wait for what its stream waits for, such as gradients of a rank that waits for the comparison."""
    for cycles in CYCLES:
        answers = ranks(2).run(on_two_streams, cycles)
        assert [answer[1:] for answer in answers] == [([NUMBER, -NUMBER], True)] * 2
        if all(is_ahead for is_ahead, *_ in answers):
            return
    pytest.fail(f"no rank's host ran ahead of a stream that was busy for {CYCLES[-1]} cycles")
