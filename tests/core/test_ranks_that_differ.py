# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that run other parts of a model, in another order, or other graphs train as a plain loop over all ranks."""

import dataclasses
import random
from typing import Dict, List

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.beside import Beside, Outcome, check
from support.ids import vary
from support.models import VOCABULARY, Block
from support.on_ranks import on_ranks
from support.training import Case, batch, device

DEPTH = 3
WIDTH = 8


class Chosen(nn.Module):
    """Runs the blocks that it is told to, in this order; for no blocks its loss does without parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def make_block(self):
        return Block(WIDTH)

    def call_block(self, block, x):
        return block(x)

    def forward(self, ids, chosen, anchor):
        if not chosen:
            return anchor.square().sum()
        x = self.embedding(ids)
        for index in chosen:
            x = self.call_block(self.blocks[index], x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class WithUnused(Chosen):
    """The last parameters get no gradients, and their turns come first to begin with."""

    def __init__(self):
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)


class Checkpointed(Chosen):
    def call_block(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class ReentrantlyCheckpointed(Chosen):
    def call_block(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


class WithUnusedCheckpointed(WithUnused, ReentrantlyCheckpointed):
    """Checkpoints hide that the last parameters get no gradients."""


class Tied(Chosen):
    """The embedding serves as the head too where an even number of blocks is run."""

    def forward(self, ids, chosen, anchor):
        x = self.embedding(ids)
        for index in chosen:
            x = self.blocks[index](x)
        weight = self.head.weight if len(chosen) % 2 else self.embedding.weight
        return F.cross_entropy(F.linear(x, weight).flatten(0, 1), ids.flatten())


class Breaking(Chosen):
    """Breaks its graph after each other block where it runs an even number of them."""

    def forward(self, ids, chosen, anchor):
        x = self.embedding(ids)
        for place, index in enumerate(chosen):
            x = self.blocks[index](x)
            if place % 2 and len(chosen) % 2 == 0:
                torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Experts(nn.Module):
    """Each token goes to one of several experts, as in Switch Transformers; experts without tokens are not called."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        scores = self.router(self.norm(x)).softmax(-1)
        best, expert = scores.max(-1)
        output = torch.zeros_like(x)
        for index, layer in enumerate(self.experts):
            rows = (expert == index).nonzero(as_tuple=True)
            if len(rows[0]):
                output = output.index_put(rows, torch.tanh(layer(x[rows])) * best[rows].unsqueeze(-1))
        return x + output


class Switch(Chosen):
    def make_block(self):
        return Experts(WIDTH)


CHECKPOINTED = (Checkpointed, ReentrantlyCheckpointed, WithUnusedCheckpointed)
MODELS = {cls.__name__: cls for cls in (Chosen, WithUnused, *CHECKPOINTED, Tied, Breaking, Switch)}


def layers_dropped(step, rank):
    """Drops layers at random, other ones on each rank, as LayerDrop does; the first always stays."""
    draw = random.Random(1000 * step + rank)
    return [0, *(index for index in range(1, DEPTH) if draw.random() < 0.5)]


# What a rank runs in a micro-batch.
PROGRAMS = {
    "branch": lambda step, rank: [0, 2] if (step + rank) % 2 else [1, 2],
    "order": lambda step, rank: [2, 0, 1] if rank else [0, 1, 2],
    "layers-dropped": layers_dropped,
    "one-without-gradients": lambda step, rank: [] if rank == 1 else [0, 1, 2],
    "turns-without-gradients": lambda step, rank: [] if (step + rank) % 2 else [0, 1, 2],
    "early-exit": lambda step, rank: list(range(1 + (step + 2 * rank) % DEPTH)),
    "alike": lambda step, rank: [0, 1, 2],
    "alike-reversed": lambda step, rank: [2, 1, 0],
    # With two micro-batches, the second leaves out a block.
    "first-micro-batch": lambda step, rank: [0, 2] if step % 2 else [0, 1, 2],
    "one-less": lambda step, rank: [0, 1, 2] if step < 4 else [0, 2],
    "alike-by-turns": lambda step, rank: [0, 1] if step % 2 else [1, 2],
}


@dataclasses.dataclass(frozen=True)
class Differing(Outcome):
    """``counters``: of the last backward of each step."""

    counters: List[Dict[str, int]]


def train(case, program, steps=5, lengths=lambda step, rank: 4, direct=False):
    """Trains a model of which each rank runs in each micro-batch what the program says.

    ``direct``: whether the caller runs ``loss.backward()`` instead of ``engine.backward(loss)``.
    """
    torch.manual_seed(0)
    pair, rank, counters = Beside(MODELS[case.model](), case), dist.get_rank(), []
    for step in range(steps):
        for micro_step in range(case.accumulation):
            number = step * case.accumulation + micro_step
            anchor = torch.ones(3, device=device(), requires_grad=True)
            ids = batch(step, micro_step, rank, lengths(number, rank))
            pair.micro_batch(ids, PROGRAMS[program](number, rank), anchor, direct=direct)
        counters.append(gradient_counters(pair.engine))
        pair.step_plain()
    return Differing(**vars(pair.end()), counters=counters)


# A model that is one graph is compiled anew for each list of blocks.
WHOLE_IS_SLOW = [True, pytest.param(False, marks=pytest.mark.slow)]
INDUCTOR_IS_SLOW = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


def differing(regional, **varied):
    return Case(config={"compile": {"regional_compilation": regional}}, **varied)


@pytest.mark.table
@vary("program", [name for name in PROGRAMS if not name.startswith(("alike", "first-", "one-less"))])
@vary("regional", WHOLE_IS_SLOW)
@vary("backend", INDUCTOR_IS_SLOW)
@vary("stage, accumulation", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_programs(ranks, stage, accumulation, backend, regional, program):
    """Ranks whose gradients come in other orders, or not at all, would average gradients of different parameters."""
    case = differing(regional, model="Chosen", stage=stage, accumulation=accumulation, backend=backend)
    check(ranks(2).run(train, case, program))


@vary("model, program", [(name, "layers-dropped") for name in MODELS if name != "Chosen"])
@vary("regional", WHOLE_IS_SLOW)
@vary("backend", INDUCTOR_IS_SLOW)
@vary("stage, accumulation", [(1, 3), (2, 1)])
@pytest.mark.table
def test_models(ranks, stage, accumulation, backend, regional, model, program):
    """Checkpoints and shared weights hide from the graph of a backward which gradients are still to come."""
    case = differing(regional, model=model, stage=stage, accumulation=accumulation, backend=backend)
    check(ranks(2).run(train, case, program))


@vary(
    "zero_optimization, compile_options",
    [
        ({"offload_optimizer": {"device": "cpu"}}, {}),
        ({}, {"overlap_param_gather": True}),
        ({"round_robin_gradients": True, "overlap_comm": False}, {}),
    ],
)
@vary("stage, accumulation", [(1, 3), (2, 1)])
def test_other_options(ranks, stage, accumulation, zero_optimization, compile_options):
    """A gradient that a rank does not have would be missing where it is copied to the host, or given to its owner."""
    config = {
        "zero_optimization": zero_optimization,
        "zero_force_ds_cpu_optimizer": False,
        "compile": {"regional_compilation": True, **compile_options},
    }
    case = Case(model="Chosen", stage=stage, accumulation=accumulation, bucket=150, config=config)
    check(ranks(2).run(train, case, "layers-dropped"))


@pytest.mark.sanitized
@vary("stage, bucket", [(1, 1), (2, 10**6)])
def test_buckets(ranks, stage, bucket):
    """A gradient that only some ranks have would begin another bucket on these ranks than on the others."""
    check(ranks(2).run(train, differing(True, model="Chosen", stage=stage, bucket=bucket), "layers-dropped"))


# Where ranks are alike -------------------------------------------------------------------------------------------


@vary("model", ["Chosen", "Checkpointed", "ReentrantlyCheckpointed", "Tied"])
@vary("regional", WHOLE_IS_SLOW)
@vary("stage", [1, 2])
def test_nothing_waits_where_ranks_are_alike(ranks, stage, regional, model):
    """Gradients would wait for their turns, in memory, in an order that the first backward has shown to be wrong."""
    case = differing(regional, model=model, stage=stage, bucket=1)
    for result in check(ranks(2).run(train, case, "alike")):
        # The first backward shows the order in which gradients arrive.
        for counters in result.counters[1:]:
            assert (counters["out_of_turn"], counters["peak_unreduced"]) == (0, 0), counters


@vary("model", ["Chosen", "WithUnused"])
@vary("regional", [True, False])
@vary("stage, groups", [(1, 2), (2, 1)])
def test_little_waits_in_the_first_backward(ranks, stage, groups, regional, model):
    """The first backward would expect another order than the reverse of the model's, and hold all gradients."""
    case = differing(regional, model=model, stage=stage, groups=groups, bucket=1)
    for result in check(ranks(2).run(train, case, "alike", steps=1)):
        # Ranks expect the reverse of the model's order. Of a layer's weight and bias either may come first.
        assert result.counters[0]["peak_unreduced"] <= 4 * 2 * WIDTH


@vary("regional", [True, False])
@vary("stage", [1, 2])
def test_no_more_than_a_bucket_waits_for_gradients_that_never_come(ranks, stage, regional):
    """All gradients would wait to the end for one that never comes, of whose lack a checkpoint does not tell."""
    case = differing(regional, model="WithUnusedCheckpointed", stage=stage, bucket=150)
    for result in check(ranks(2).run(train, case, "alike", steps=1)):
        counters, largest = result.counters[0], VOCABULARY * WIDTH
        assert counters["out_of_turn"] > 0, "no gradient waited, so nothing was shown"
        assert counters["peak_unreduced"] <= 4 * (150 + largest)


@vary("bucket", [1, 150, 10**6])
@vary("stage, accumulation", [(1, 3), (2, 1)])
def test_gradients_come_in_the_reverse_of_the_order_expected(ranks, stage, accumulation, bucket):
    """Ranks would never agree on a new order, so that gradients wait in every backward."""
    case = differing(True, model="Chosen", stage=stage, accumulation=accumulation, bucket=bucket)
    for result in check(ranks(2).run(train, case, "alike-reversed", steps=3)):
        waited = [counters["out_of_turn"] > 0 for counters in result.counters]
        assert waited == [True, False, False], result.counters


@vary("stage", [1, 2])
def test_nothing_waits_where_alike_ranks_take_another_branch(ranks, stage):
    """Gradients would wait for those of a branch that the graph of this backward does not contain."""
    case = differing(True, model="Chosen", stage=stage, bucket=1)
    for result in check(ranks(2).run(train, case, "alike-by-turns", steps=8)):
        # Both branches have been seen. The graph shows which gradients cannot come.
        for counters in result.counters[4:]:
            assert counters["out_of_turn"] == 0, counters


def test_a_sum_of_earlier_micro_batches_keeps_its_turn(ranks):
    """A gradient that the last micro-batch lacks would lose its turn, and its sum of earlier ones come too late."""
    case = differing(True, model="Chosen", accumulation=2, bucket=1)
    for result in check(ranks(2).run(train, case, "first-micro-batch", steps=20)):
        assert [counters["out_of_turn"] for counters in result.counters[1:]] == [0] * 19


@vary("direct", [True, False])
@vary("stage", [1, 2])
def test_turns_that_no_rank_needs_any_more_are_given_up(ranks, stage, direct):
    """Ranks would send zeros for ever for a parameter that none of them uses any more."""
    case = differing(True, model="Chosen", stage=stage, bucket=1)
    first, *results = check(ranks(2).run(train, case, "one-less", steps=24, direct=direct))
    sent = [counters["buckets_sent"] for counters in first.counters]
    assert sent[0] == sent[10] > sent[-1] == sent[0] - len(list(Block(WIDTH).parameters()))
    for result in (first, *results):
        for counters in result.counters[1:]:
            assert (counters["out_of_turn"], counters["peak_unreduced"]) == (0, 0), counters


# Graphs that one rank compiles -----------------------------------------------------------------------------------


@vary("which", [0, 1])
@vary("regional", [True], slow=[False])
@vary("stage, accumulation", [(1, 1), (2, 3)])
@on_ranks(2)
# Graphs are for one shape each.
@torch._dynamo.config.patch(recompile_limit=1)
def test_one_rank_reaches_the_limit_of_compilations(stage, accumulation, regional, which):
    """A rank whose blocks run uncompiled would send buckets in an order that the others' graphs do not have."""
    case = differing(
        regional, model="Chosen", stage=stage, accumulation=accumulation, compile_kwargs={"dynamic": False}
    )
    (result,) = check([train(case, "alike", steps=6, lengths=lambda step, rank: 4 + step * (rank == which))])
    assert (result.from_graphs[-1] > 0) == (dist.get_rank() != which)


# A loss that does without the engine -----------------------------------------------------------------------------


@vary("stage", [1, 2])
@on_ranks(2)
def test_a_backward_without_the_model_replaces_gradients_too(stage):
    """A rank whose backward needs nothing of the model would keep the gradients that the other ranks have replaced."""
    pair, rank = Beside(Chosen(), differing(True, stage=stage)), dist.get_rank()
    for step in range(3):
        anchor = torch.ones(3, device=device(), requires_grad=True)
        pair.engine.backward(pair.engine(batch(step, 0, rank, 4), [0, 1], anchor))
        loss = pair.engine(batch(step, 1, rank, 4), [0, 1], anchor)
        pair.engine.backward(anchor.square().sum() if rank == 1 else loss)
        pair.engine.step()
        if rank == 0:
            pair.plain(batch(step, 1, rank, 4), [0, 1], anchor).backward()
        pair.step_plain()
    check([pair.end()])


# Several engines -------------------------------------------------------------------------------------------------


@pytest.mark.sanitized
@on_ranks(2)
def test_two_engines():
    """Two engines would share the order in which gradients are expected."""
    cases = [differing(True, stage=1), differing(True, stage=2)]
    pairs = [Beside(Chosen(), case, reset=not number) for number, case in enumerate(cases)]
    for step in range(4):
        for number, pair in enumerate(pairs):
            anchor = torch.ones(3, device=device(), requires_grad=True)
            ids = batch(step, number, dist.get_rank(), 4)
            # Each rank runs other parts of each model.
            pair.step(ids, PROGRAMS["branch"](step + number, dist.get_rank()), anchor)
    check([pair.end() for pair in pairs])
