# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Forwards, backwards and compilations of one engine in other numbers and orders than one of each a step."""

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.engines import CaseBeside, check_one
from support.ids import vary
from support.training import NOTHING, Case, batch, device, held


def forwards_before_a_backward(case, direct):
    """Four forwards, then the backwards of two of them in the other order, then one backward of the others.

    Returns the errors. All forwards come first: a later one would begin a step anew.
    """
    pair = CaseBeside(case)
    for step in range(2):
        batches = [batch(step, number, dist.get_rank(), 4) for number in range(4)]
        backward = torch.Tensor.backward if direct else pair.engine.backward
        first, second, *others = [pair.engine(batch) for batch in batches]
        backward(second)
        backward(first)
        backward(others[0] * others[1])
        pair.engine.step()
        assert held(gradient_counters(pair.engine)) == NOTHING
        (pair.plain(batches[0]) + pair.plain(batches[1])).backward()
        (pair.plain(batches[2]) * pair.plain(batches[3])).backward()
        pair.step_plain()
    return pair.end()


@pytest.mark.sanitized
@pytest.mark.parametrize("model", ["OneGraph", "RepeatedLayers", "EagerBlocks"])
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
@vary("stage", [1, 2])
def test_forwards_before_their_backwards(ranks, direct, model, stage):
    """The second of two backwards would find the bookkeeping of the last forward, and replace the first one's sum."""
    case = Case(model=model, stage=stage)
    check_one(ranks(2).run(forwards_before_a_backward, case, direct), case)


def backwards_of_one_forward(case, how):
    """Two losses of one forward with a backward each, and one that goes backward twice; returns the errors."""
    pair = CaseBeside(case)
    # A backward whose graph gives its buffers away cannot run twice.
    torch._functorch.config.donated_buffer = False

    def backward(loss, number, retain_graph=False):
        if how == "loss" or (how == "both" and number % 2):
            loss.backward(retain_graph=retain_graph)
        else:
            pair.engine.backward(loss, retain_graph=retain_graph)

    for step in range(3):
        ids = batch(step, 0, dist.get_rank(), 4)
        loss = pair.engine(ids)
        for number in range(2):
            backward(loss * (1 + number), number, retain_graph=True)
        backward(loss.square(), 2)
        pair.engine.step()
        loss = pair.plain(ids)
        (3 * loss + loss.square()).backward()
        pair.step_plain()
    torch._functorch.config.donated_buffer = True
    return pair.end()


@pytest.mark.parametrize("how", ["engine", "loss", "both"])
@vary("stage", [1, 2])
def test_several_backwards_of_one_forward(ranks, how, stage):
    """A later backward of the same forward would replace what the earlier ones gave, or be lost."""
    case = Case(model="SeveralGraphs", stage=stage, config={"wall_clock_breakdown": how == "both"})
    check_one(ranks(2).run(backwards_of_one_forward, case, how), case)


def computed_again(case, direct, both):
    """Outputs of two forwards, the first or both computed again in the backward of one loss; returns the errors."""
    torch._dynamo.reset()
    pair = CaseBeside(case)

    def loss_of(model, step):
        def run(factor, ids):
            return factor * model(ids)

        batches = [batch(step, number, dist.get_rank(), 4) for number in range(2)]
        # Something has to need a gradient in the forward that is thrown away.
        factor = torch.ones((), device=device(), requires_grad=True)
        first = checkpoint(run, factor, batches[0], use_reentrant=True)
        return first * (checkpoint(run, factor, batches[1], use_reentrant=True) if both else model(batches[1]))

    for step in range(3):
        (torch.Tensor.backward if direct else pair.engine.backward)(loss_of(pair.engine, step))
        pair.engine.step()
        loss_of(pair.plain, step).backward()
        pair.step_plain()
    return pair.end()


@pytest.mark.parametrize(
    "direct, both",
    [(False, True), (False, False), (True, False)],
    ids=["engine.backward-both", "engine.backward-first", "loss.backward-first"],
)
@vary("stage", [1, 2])
def test_computed_again(ranks, direct, both, stage):
    """A backward within another one, for a forward that is computed again, would end the step's backward early."""
    if direct and torch.cuda.is_available():
        pytest.skip("gradients are dropped on a GPU: docs/reference/limits.md has it among the limits")
    case = Case(model="EagerBlocks", stage=stage)
    check_one(ranks(2).run(computed_again, case, direct, both), case)


def compiled_again(case):
    """``engine.compile()`` is called again between steps; returns the errors."""
    torch._dynamo.reset()
    pair = CaseBeside(case)
    for step in range(3):
        pair.step(step)
        pair.engine.compile(backend=case.backend)
    return pair.end()


def test_a_second_compile(ranks):
    """A second setup would register each parameter twice, so that its gradient counts twice."""
    case = Case(model="FillsPartition", stage=2)
    check_one(ranks(2).run(compiled_again, case), case)
