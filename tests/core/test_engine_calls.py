# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Forwards, backwards and compilations of one engine in other numbers and orders than one of each a step."""

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.engines import CaseBeside
from support.ids import vary
from support.on_ranks import on_ranks
from support.training import BOUND, NOTHING, Case, batch, device, held


@pytest.mark.sanitized
@pytest.mark.parametrize("model", ["OneGraph", "RepeatedLayers", "EagerBlocks"])
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
@vary("stage", [1, 2])
@on_ranks(2)
def test_forwards_before_their_backwards(direct, model, stage):
    """The second of two backwards would find the bookkeeping of the last forward, and replace the first one's sum."""
    pair = CaseBeside(Case(model=model, stage=stage))
    for step in range(2):
        # All forwards come first: a later one would begin a step anew.
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
    assert pair.end().worst < BOUND


@pytest.mark.parametrize("how", ["engine", "loss", "both"])
@vary("stage", [1, 2])
@on_ranks(2)
# A backward whose graph gives its buffers away cannot run twice.
@torch._functorch.config.patch(donated_buffer=False)
def test_several_backwards_of_one_forward(how, stage):
    """A later backward of the same forward would replace what the earlier ones gave, or be lost."""
    pair = CaseBeside(Case(model="SeveralGraphs", stage=stage, config={"wall_clock_breakdown": how == "both"}))

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
    assert pair.end().worst < BOUND


@pytest.mark.parametrize(
    "direct, both",
    [(False, True), (False, False), (True, False)],
    ids=["engine.backward-both", "engine.backward-first", "loss.backward-first"],
)
@vary("stage", [1, 2])
@on_ranks(2)
def test_computed_again(direct, both, stage):
    """A backward within another one, for a forward that is computed again, would end the step's backward early."""
    if direct and torch.cuda.is_available():
        pytest.skip("gradients are dropped on a GPU: docs/reference/limits.md has it among the limits")
    pair = CaseBeside(Case(model="EagerBlocks", stage=stage))

    def loss_of(model, step):
        def run(factor, ids):
            return factor * model(ids)

        batches = [batch(step, number, dist.get_rank(), 4) for number in range(2)]
        # Something has to need a gradient in the forward that is thrown away.
        factor = torch.ones((), device=device(), requires_grad=True)
        # The first or both are computed again in the backward of one loss.
        first = checkpoint(run, factor, batches[0], use_reentrant=True)
        return first * (checkpoint(run, factor, batches[1], use_reentrant=True) if both else model(batches[1]))

    for step in range(3):
        (torch.Tensor.backward if direct else pair.engine.backward)(loss_of(pair.engine, step))
        pair.engine.step()
        loss_of(pair.plain, step).backward()
        pair.step_plain()
    assert pair.end().worst < BOUND


@on_ranks(2)
def test_a_second_compile():
    """A second setup would register each parameter twice, so that its gradient counts twice."""
    case = Case(model="FillsPartition", stage=2)
    pair = CaseBeside(case)
    for step in range(3):
        pair.step(step)
        pair.engine.compile(backend=case.backend)
    assert pair.end().worst < BOUND
