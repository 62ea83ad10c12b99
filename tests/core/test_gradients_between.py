# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a caller does with gradients between the micro-batches of a step, and with steps that are not taken.

A script says it, a letter a move: F a forward with the next micro-batch, B the backward of the oldest forward that
waits for its own, S ``engine.step()``, D dropping what there is, C clipping ``p.grad`` by hand.
"""

import collections
import dataclasses
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.beside import Beside, Outcome, warnings_logged
from support.ids import vary
from support.models import VOCABULARY
from support.on_ranks import on_ranks
from support.options import outcome
from support.training import BOUND, Case, batch, held, relative_error


class Step(NamedTuple):
    """What a script does in a step, and which of its micro-batches, from 0, the step is to have."""

    script: str
    counted: Tuple[int, ...]
    drop: Optional[Callable] = None


class BothRoutes(nn.Module):
    """Graphs reduce some gradients, and autograd accumulates those of a part that is not compiled."""

    def __init__(self, width=6):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.inside, self.outside = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        x = self.uncompiled(torch.tanh(self.inside(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    @torch.compiler.disable
    def uncompiled(self, x):
        return x + F.linear(self.outside(x), self.inside.weight)


def by_hand(engine):
    for parameter in engine.module.parameters():
        parameter.grad = None


def with_zeros(engine):
    engine.optimizer.zero_grad(set_to_none=False)


def engines(engine):
    engine.zero_grad()


def optimizers(engine):
    engine.optimizer.zero_grad()


def modules(engine):
    engine.module.zero_grad()


def modules_with_zeros(engine):
    engine.module.zero_grad(set_to_none=False)


# In ZeRO-2 a micro-batch's gradients have left the parameters when its backward ends.
OF_ENGINE = [engines, optimizers, with_zeros]
DROPS = [*OF_ENGINE, modules, modules_with_zeros, by_hand]


def clip(module, max_norm=0.01):
    torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)


def follow(engine, script, drop, batches):
    """Moves an engine as the script says; returns the gradients that parameters hold where it clips them."""
    waiting, batches, seen = collections.deque(), iter(batches), []
    for move in script:
        if move == "F":
            waiting.append(engine(next(batches)))
        elif move == "B":
            engine.backward(waiting.popleft())
        elif move == "S":
            engine.step()
        elif move == "D":
            drop(engine)
        else:
            seen = [
                None if parameter.grad is None else parameter.grad.clone() for parameter in engine.module.parameters()
            ]
            clip(engine.module)
    return seen


@dataclasses.dataclass(frozen=True)
class Followed(Outcome):
    """What came of the steps of scripts.

    Attributes:
        errors: the largest relative error of a parameter after each step, by the step's name.
        warnings: those of DeepSpeed.
        of_clipped: for each step that clips by hand, the error of the gradients that were clipped; None where a
            parameter held none.
    """

    errors: Dict[str, float]
    warnings: List[str]
    of_clipped: List[Optional[float]]


def train(case, steps):
    """Takes the steps, each under a name."""
    torch.manual_seed(0)
    module = BothRoutes()
    if case.dtype == "bf16":
        # The engine begins with rounded parameters, and so shall the plain loop.
        module.bfloat16().float()
    pair, rank = Beside(module, case), dist.get_rank()
    errors, of_clipped = {}, []
    with warnings_logged() as warnings:
        for number, (name, step) in enumerate(steps.items()):
            batches = [batch(number, index, rank, 4) for index in range(step.script.count("F"))]
            seen = follow(pair.engine, step.script, step.drop, batches)
            for index in step.counted:
                (pair.plain(batches[index]) / case.accumulation).backward()
                if seen and index == 0:
                    own = [parameter.grad for parameter in pair.plain.parameters()]
                    of_clipped.append(None if None in seen else relative_error(seen, own))
                    clip(pair.plain)
            pair.step_plain()
            errors[name] = pair.error()
    return Followed(**vars(pair.end()), errors=errors, warnings=warnings, of_clipped=of_clipped)


def check(results):
    for result in results:
        # An error stays in the parameters, so the first that is large tells what is wrong.
        assert max(result.errors.values()) < BOUND, result.errors
        assert result.moved > 1e-3
    return results


@vary(
    "accumulation, script, counted",
    [
        *((1, "FBDFBS", (1,)), (2, "FBSDFBS", (1,)), (2, "FBDSFBS", (1,))),
        *((2, "FBSFBDFBS", (2,)), (2, "DFBSFBS", (0, 1))),
    ],
    expects="counted",
)
@vary("stage", [1, 2])
@pytest.mark.follows("call it before the first micro-batch of a step, or not at all")
def test_dropped(ranks, accumulation, script, counted, stage):
    """One of the ways to drop gradients would leave what graphs have reduced, which the next step then adds. Or nobody
    would learn that a program which drops them for each micro-batch trains otherwise than without DeepCompile."""
    drops = {drop.__name__: Step(script, counted, drop) for drop in (DROPS if stage == 1 else OF_ENGINE)}
    for rank, result in enumerate(check(ranks(2).run(train, Case(stage=stage, accumulation=accumulation), drops))):
        # ZeRO-2 without DeepCompile keeps what it has reduced.
        told = [text for text in result.warnings if "call it before the first micro-batch of a step" in text]
        assert len(told) == (stage == 2 and rank == 0 and script in ("FBSDFBS", "FBDSFBS"))


def test_parameters_hold_nothing_of_what_was_reduced(ranks):
    """Dropping what parameters hold would drop, other than in DeepSpeed, what ZeRO-2 has reduced already."""
    # In ZeRO-2 a micro-batch's gradients have left the parameters, in DeepSpeed as well.
    steps = {drop.__name__: Step("FBSDFBS", (0, 1), drop) for drop in (modules, modules_with_zeros, by_hand)}
    for deepcompile in (True, False):
        check(ranks(2).run(train, Case(stage=2, accumulation=2, deepcompile=deepcompile), steps))


NOT_TAKEN = {
    1: {"two": Step("FBFBS", (1,)), "three": Step("FBFBFBS", (2,)), "taken": Step("FBS", (0,))},
    2: {"two": Step("FBSFBFBS", (2,)), "taken": Step("FBSFBS", (0, 1))},
}


@vary("deepcompile", [True, False])
@vary("accumulation", [1, 2])
@vary("stage", [1, 2])
def test_steps_that_are_not_taken(ranks, deepcompile, accumulation, stage):
    """A later backward at the boundary would add to what nobody stepped, or replace it without a word."""
    case = Case(stage=stage, accumulation=accumulation, deepcompile=deepcompile)
    for result in check(ranks(2).run(train, case, NOT_TAKEN[accumulation])):
        assert len(result.warnings) == int(deepcompile), result.warnings


@vary("stage", [1, 2])
@on_ranks(2)
def test_a_step_without_its_last_backward(stage):
    """The next step would add the gradients of micro-batches that a refused step had."""
    pair = Beside(BothRoutes(), Case(stage=stage, accumulation=2))
    engine, rank = pair.engine, dist.get_rank()
    engine.backward(engine(batch(0, 0, rank, 4)))
    engine.step()
    assert "run all of the step's micro-batches again" in outcome(engine.step)
    assert sum(held(gradient_counters(engine)).values()) == 0
    for micro_step in range(2):
        pair.micro_batch(batch(1, micro_step, rank, 4))
    pair.step_plain()
    assert pair.last_error() < BOUND


# Forwards that all began before the first of their backwards belong together.
TOGETHER = {
    1: {"replaced": Step("FFBBFBS", (2,)), "replacing": Step("FBFFBBS", (1, 2))},
    2: {"two": Step("FBSFFBBS", (0, 1, 2))},
}


@vary("accumulation", [1, 2])
@vary("stage", [1, 2])
def test_forwards_that_belong_together_replace_a_step(ranks, accumulation, stage):
    """The second of two backwards that belong together would replace the first as if it were a step not taken."""
    check(ranks(2).run(train, Case(stage=stage, accumulation=accumulation), TOGETHER[accumulation]))


def test_clipped_by_hand(ranks):
    """``p.grad`` between micro-batches would be a copy, so that what the caller makes of it has no effect."""
    steps = {f"step {number}": Step("FBSCFBS", (0, 1)) for number in range(3)}
    for result in check(ranks(2).run(train, Case(accumulation=2), steps)):
        # Parameters hold the rank's own sum in ZeRO-1.
        assert max(result.of_clipped) < BOUND


IN_BF16 = {
    "engine.zero_grad": Step("FBSDFBS", (1,), engines),
    "module.zero_grad": Step("FBSDFBS", (1,), modules),
    "clipped by hand": Step("FBSCFBS", (0, 1)),
    "not taken": Step("FBSFBFBS", (2,)),
}


@vary("deepcompile", [True, False])
def test_in_bf16(ranks, deepcompile):
    """Sums in fp32 beside gradients in bf16 would outlive what drops or clips these."""
    case = Case(accumulation=2, dtype="bf16", deepcompile=deepcompile)
    for result in ranks(2).run(train, case, IN_BF16):
        # 8 bits; what was to be dropped is half of what the parameters moved.
        assert result.total_error < 0.1 * result.moved
