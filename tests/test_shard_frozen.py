# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters that are sharded over ranks train to the same bits as whole ones."""

import contextlib
from typing import Any, List, NamedTuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero12 import whole_parameters
from deepspeed.compile.zero12.at_rest import AtRest
from deepspeed.compile.zero12.unit import Unit

from support.frozen import MODELS, late
from support.ids import vary
from support.training import Case, batch, device, make_engine

SHARDED = {"compile": {"regional_compilation": True, "shard_frozen": True}}
WHOLE = {"compile": {"regional_compilation": True}}


def make(model, config, **case):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = MODELS[model]().to(device())
    return module, make_engine(module, Case(adam=True, config=config, **case))


class Trained(NamedTuple):
    losses: List[torch.Tensor]
    parameters: List[torch.Tensor]
    at_rest: int  # parameters that were at rest after the steps
    most_whole: int  # units that were whole or on their way at a time


@contextlib.contextmanager
def watched(engine):
    """Yields a list to which it appends how many units are whole or on their way whenever one is begun."""
    counts, start = [], Unit.start
    sharded = engine.optimizer._zero12.sharded

    def counted(self):
        start(self)
        counts.append(sum(unit.is_whole or unit._work is not None for unit in sharded.units))

    Unit.start = counted
    try:
        yield counts
    finally:
        Unit.start = start


def train(model, config, steps=3, skips=False, evaluates=False, **case):
    module, engine = make(model, config, **case)
    rank, losses = dist.get_rank(), []
    with watched(engine) as counts:
        for step in range(steps):
            for micro_step in range(engine.gradient_accumulation_steps()):
                loss = engine(batch(step, micro_step, rank, 4), skips and (rank + step) % 2 == 0)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            if evaluates:
                engine.eval()
                with torch.no_grad():
                    losses.append(engine(batch(step, 0, rank, 5)))
                engine.train()
    at_rest = sum(isinstance(each, AtRest) for each in module.parameters())
    with whole_parameters(engine):
        parameters = [each.detach().clone() for each in module.parameters()]
        engine.destroy()
    return Trained(losses, parameters, at_rest, max(counts, default=0))


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Compared(NamedTuple):
    same: bool
    at_rest: int
    most_whole: int


def compare(model, delay=None, **more):
    with late(delay) if delay is not None else contextlib.nullcontext():
        sharded = train(model, SHARDED, **more)
    whole = train(model, WHOLE, **more)
    assert whole.at_rest == 0
    equal = same(sharded.losses, whole.losses) and same(sharded.parameters, whole.parameters)
    return Compared(equal, sharded.at_rest, sharded.most_whole)


@pytest.mark.quick
@vary(
    "model, backend",
    [*((model, "eager") for model in MODELS), ("plain", "inductor"), ("non-reentrant", "inductor")],
)
@vary("world, stage, accumulation", [(2, 1, 2), (3, 2, 1)])
def test_it_trains_to_the_same_bits(ranks, model, backend, world, stage, accumulation):
    for result in ranks(world).run(compare, model, stage=stage, accumulation=accumulation, backend=backend):
        assert result.same
        assert result.at_rest >= 18
        assert result.most_whole == 2 if world > 1 else 0
