# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A forward that changes parameters in place, and tensors saved for the backward that somebody copies.

What a forward changes in parameters is gone after the step, as in DeepSpeed without DeepCompile: the step begins from
the optimizer's own copies.
"""

import dataclasses
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from deepspeed.compile.zero_1_and_2 import wait_for_parameters

from support.beside import Beside, Outcome, check, logged
from support.ids import vary
from support.models import VOCABULARY, Block, Model
from support.on_ranks import on_ranks
from support.training import REGIONAL, Case, batch, build, make_engine

LIMIT = 0.4


class MaxNorm(Model):
    """The rows of its embedding are scaled down where they are looked up."""

    def __init__(self, width=8, depth=2):
        super().__init__(width, depth)
        self.embedding = nn.Embedding(VOCABULARY, width, max_norm=LIMIT)


class MaxNormInBlocks(Model):
    class block(Block):
        def __init__(self, width):
            super().__init__(width)
            self.codes = nn.Embedding(5, width, max_norm=LIMIT)

        def forward(self, x):
            codes = torch.arange(5, device=x.device)
            return super().forward(x + self.codes(codes).sum(0))


class Clamped(Model):
    class block(Block):
        def forward(self, x):
            with torch.no_grad():
                self.up.weight.clamp_(-LIMIT / 4, LIMIT / 4)
            return super().forward(x)


class FromMasters(Beside):
    """A step of the plain loop begins from what the step before it left."""

    def __init__(self, module, case):
        super().__init__(module, case)
        self.masters = [parameter.detach().clone() for parameter in self.plain.parameters()]
        self.most_changed = 0.0

    def step_plain(self):
        parameters = list(self.plain.parameters())
        for parameter, master in zip(parameters, self.masters, strict=True):
            self.most_changed = max(self.most_changed, float((parameter.detach() - master).abs().max()))
            parameter.data.copy_(master)
        super().step_plain()
        self.masters = [parameter.detach().clone() for parameter in parameters]


@dataclasses.dataclass(frozen=True)
class Changed(Outcome):
    """``changed``: how far a forward changed an element of a parameter, at most."""

    changed: float


def train(make, case):
    torch.manual_seed(0)
    pair, rank = FromMasters(make(width=8, depth=2), case), dist.get_rank()
    for step in range(3):
        for micro_step in range(case.accumulation):
            pair.micro_batch(batch(step, micro_step, rank, 4))
        pair.step_plain()
    return Changed(**vars(pair.end()), changed=pair.most_changed)


def with_blocks(wanted):
    return {"compile": {"regional_compilation": wanted}}


@vary("regional", [True, False])
@vary("make", [MaxNorm, MaxNormInBlocks, Clamped])
@vary("stage, accumulation", [(1, 1), (2, 2)])
def test_changed_in_place(ranks, stage, accumulation, make, regional):
    """What a forward changes in a parameter would reach the optimizer's copy, or be lost before the backward."""
    case = Case(stage=stage, accumulation=accumulation, config=with_blocks(regional))
    for result in check(ranks(2).run(train, make, case)):
        assert result.changed > 0.01, "the forward changed no parameter"


@pytest.mark.slow
@vary("make, regional", [(MaxNorm, False), (MaxNormInBlocks, True), (Clamped, True)])
def test_changed_in_place_by_generated_code(ranks, make, regional):
    check(ranks(2).run(train, make, Case(backend="inductor", config=with_blocks(regional))))


@vary("make", [MaxNorm, MaxNormInBlocks, Clamped])
def test_deepspeed_does_the_same(ranks, make):
    """The other tests would hold DeepCompile to what DeepSpeed no longer does."""
    check(ranks(2).run(train, make, Case(accumulation=2, deepcompile=False)))


def copies():
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)


def detached():
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


def on_cpu():
    return torch.autograd.graph.save_on_cpu()


def train_with_hooks(make_hooks, case):
    """Trains with hooks on the tensors that each forward saves."""
    pair, rank = Beside(Model(width=8, depth=2), case), dist.get_rank()
    for step in range(3):
        ids = batch(step, 0, rank, 4)
        with make_hooks():
            loss = pair.engine(ids)
        pair.engine.backward(loss)
        pair.engine.step()
        pair.plain(ids).backward()
        pair.step_plain()
    return pair.end()


@vary("regional", [True, False])
@vary("hooks", [copies, detached, on_cpu])
def test_hooks_on_saved_tensors(ranks, hooks, regional):
    """A backward would take a parameter that a hook has copied for one, and reduce no gradient of it."""
    check(ranks(1).run(train_with_hooks, hooks, Case(config=with_blocks(regional))))


@vary("regional", [True], slow=[False])
def test_hooks_on_saved_tensors_of_generated_code(ranks, regional):
    """Generated code would read a tensor that a hook has copied at another address than it was compiled for."""
    check(ranks(1).run(train_with_hooks, copies, Case(backend="inductor", config=with_blocks(regional))))


@on_ranks(1)
def test_a_block_unfrozen_after_the_engine_was_made():
    """A parameter that the optimizer does not have would train in no way, without a word."""
    case = Case(model="BlocksWithin", config=REGIONAL)
    module = build(case)
    module.body.blocks[0].requires_grad_(False)
    engine = make_engine(module, case)
    ids = batch(0, 0, dist.get_rank(), 4)
    engine.backward(engine(ids))
    engine.step()
    module.body.blocks[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="or its requires_grad set, after the engine was made; create a new engine"):
        engine(ids)
    engine.destroy()


def says_of_kept(compiles_first, keep):
    """Whether this rank says that what ``keep`` returns does not follow, and whether it follows in a step."""
    module = build(Case(model="FillsPartition"))
    engine = make_engine(module, Case(config={"compile": {"deepcompile": True}}, deepcompile=False))
    with logged(logging.INFO) as texts:
        if compiles_first:
            engine.compile(backend="eager")
        kept = keep(module)
        engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
        engine.step()
        wait_for_parameters(engine)
    follows = all(torch.equal(value, parameter) for value, parameter in zip(kept, module.parameters()))
    engine.destroy()
    return any("does not follow the parameters" in text for text in texts), follows


@pytest.mark.follows("from now on; keep the parameters instead")
@on_ranks(2)
def test_what_was_taken_before_an_engine_compiles_itself():
    """An average or a clamp that keeps `parameter.data` would work on memory that nobody trains, without a word."""
    assert says_of_kept(False, lambda module: [*module.state_dict().values()]) == (True, False)
    assert says_of_kept(True, lambda module: [*module.state_dict().values()]) == (False, True)
    assert says_of_kept(False, lambda module: [*module.parameters()]) == (False, True)
