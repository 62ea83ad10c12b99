# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Backwards that go through an engine for somebody else, and gradients that no backward of the engine announces.

Each of these programs ends with the parameters of a plain loop. DeepSpeed without DeepCompile does the same or raises.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.utils import safe_get_full_grad

from support.beside import Beside, check, warnings_logged
from support.critic import WIDTH, Critic, rows
from support.graph_cache import compiled_anew
from support.ids import vary
from support.models import Block
from support.on_ranks import on_ranks
from support.training import (
    BOUND,
    Case,
    average_gradients,
    device,
    make_engine,
    make_optimizer,
    relative_error,
    step_plain,
)


@contextlib.contextmanager
def frozen(*modules):
    """Within it, no parameter of the modules requires a gradient: as Lightning's ``toggle_optimizer()`` has it."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class Adversaries:
    """Two engines, or two plain models, of which the generator trains through the critic."""

    def __init__(self, critic, generator, backward):
        self.critic, self.generator, self.backward = critic, generator, backward

    def train_critic(self, x, toggles):
        with frozen(self.modules[1]) if toggles else contextlib.nullcontext():
            fake = self.generator(x).detach()
            loss = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake)).mean()
            self.backward(self.critic, loss)

    def train_generator(self, x):
        with frozen(self.modules[0]):
            self.backward(self.generator, F.softplus(-self.critic(self.generator(x))).mean())

    @property
    def modules(self):
        return [getattr(engine, "module", engine) for engine in (self.critic, self.generator)]


class Checkpointed(nn.Sequential):
    """Hides its parameters from the graph of a backward."""

    @torch.compiler.disable
    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


def train_adversaries(case, toggles, checkpointed=False):
    sequence = Checkpointed if checkpointed else nn.Sequential
    modules = [Critic().to(device()), sequence(Block(WIDTH), nn.Linear(WIDTH, WIDTH)).to(device())]
    plain = copy.deepcopy(modules)
    before = copy.deepcopy(modules)
    optimizers = [make_optimizer(module, case) for module in plain]
    engines = [make_engine(module, case) for module in modules]
    ours = Adversaries(*engines, lambda engine, loss: engine.backward(loss))
    theirs = Adversaries(*plain, lambda _, loss: (loss / case.accumulation).backward())
    with warnings_logged() as warnings:
        for step in range(3):
            for micro_step in range(case.accumulation):
                x = rows(step, micro_step)
                for outcome in (ours, theirs):
                    outcome.train_critic(x, toggles)
                    outcome.train_generator(x)
                for engine in engines:
                    engine.step()
            for module, optimizer in zip(plain, optimizers):
                step_plain(module, optimizer)
    errors = [relative_error(a.parameters(), b.parameters()) for a, b in zip(modules, plain)]
    moved = [relative_error(a.parameters(), b.parameters()) for a, b in zip(modules, before)]
    for engine in engines:
        engine.destroy()
    return errors, moved, warnings


@pytest.mark.sanitized
@vary("stage, accumulation, toggles", [(1, 1, False), (2, 1, True), (1, 2, True), (2, 4, True), (1, 4, False)])
@vary("deepcompile", [True, False])
def test_a_generator_trains_through_its_frozen_critic(ranks, stage, accumulation, toggles, deepcompile):
    """A backward that only passes through the critic would end the critic's own, which the step has not had yet."""
    case = Case(stage=stage, accumulation=accumulation, deepcompile=deepcompile)
    for errors, moved, warnings in ranks(2).run(train_adversaries, case, toggles):
        assert max(errors) < BOUND, errors
        assert min(moved) > 1e-3
        assert not warnings, warnings


@vary("stage, accumulation", [(1, 1), (2, 2)])
def test_a_generator_that_is_checkpointed(ranks, stage, accumulation):
    """Parameters of the generator, which a checkpoint hides, would seem to have no part in its backward."""
    case = Case(stage=stage, accumulation=accumulation)
    for errors, moved, warnings in ranks(2).run(train_adversaries, case, False, True):
        assert max(errors) < BOUND, errors
        assert min(moved) > 1e-3
        assert not warnings, warnings


def saliency(engine, x):
    """What ``torch.autograd.grad()`` returns for an input, as for saliency maps, FGSM, and actors that ask critics."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(engine(x).sum(), x)[0]


@vary("places", [("after",), ("before", "between", "after")])
@vary("stage, accumulation, direct", [(1, 1, False), (2, 2, True), (1, 2, False), (2, 1, False), (1, 1, True)])
@on_ranks(2)
def test_gradients_of_inputs_belong_to_no_step(stage, accumulation, direct, places):
    """The parameters' gradients that graphs compute for an input's would be added to those of the step."""
    pair = Beside(Critic(), Case(stage=stage, accumulation=accumulation))
    engine, plain, errors = pair.engine, pair.plain, []

    def ask(place, x):
        if place in places:
            # DeepSpeed divides the gradient of an engine's output by the number of micro-batches.
            errors.append(relative_error([saliency(engine, x)], [saliency(plain, x) / accumulation]))

    for step in range(3):
        for micro_step in range(accumulation):
            x = rows(step, micro_step)
            ask("before", x)
            loss = engine(x).square().mean()
            ask("between", x)
            loss.backward() if direct else engine.backward(loss)
            (plain(x).square().mean() / accumulation).backward()
            ask("after", x)
            engine.step()
        pair.step_plain()
    check([pair.end()])
    assert max(errors) < BOUND


@vary("stage", [1, 2])
@on_ranks(2)
def test_a_step_sends_nothing_of_a_penalty_again(stage):
    """The rank with the penalty would send buckets of zeros in its step, for which no other rank waits."""
    module = Critic().to(device())
    engine = make_engine(module, Case(stage=stage))
    if dist.get_rank() == 0:
        penalty_of(module).backward()
    engine.backward(engine(rows(0)).square().mean())
    before = gradient_counters(engine)["buckets_sent"]
    engine.step()
    sent = gradient_counters(engine)["buckets_sent"] - before
    engine.destroy()
    assert sent == 0


def penalty_of(module):
    """Of parameters alone: no output of the engine leads to it."""
    return 0.05 * sum(parameter.square().sum() for parameter in module.parameters())


@pytest.mark.sanitized
@vary("first", [True, False])
@vary("direct", [True, False])
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 1), (2, 2)])
@on_ranks(2)
def test_a_penalty_has_a_backward_of_its_own(stage, accumulation, first, direct):
    """Gradients of a penalty would be dropped where the loss's backward replaces a step that nobody has taken."""
    pair = Beside(Critic(), Case(stage=stage, accumulation=accumulation))
    engine, plain = pair.engine, pair.plain
    with warnings_logged() as warnings:
        for step in range(3):
            for micro_step in range(accumulation):
                x = rows(step, micro_step)
                loss = None if first else engine(x).square().mean()
                (penalty_of(pair.module) / accumulation).backward()
                loss = engine(x).square().mean() if first else loss
                loss.backward() if direct else engine.backward(loss)
                engine.step()
                ((plain(x).square().mean() + penalty_of(plain)) / accumulation).backward()
            pair.step_plain()
    check([pair.end()])
    assert not warnings


@vary("stage", [1, 2])
@on_ranks(2)
# A backward that torch compiles at its first call knows that the graph is retained, and one that is loaded does not.
@compiled_anew()
def test_a_backward_behind_one_that_passed_through(stage):
    """A graph that ran for an input's gradient would count as done when loss.backward() runs it again."""
    pair = Beside(Critic(), Case(stage=stage))
    errors = []
    for step in range(3):
        x = rows(step).requires_grad_()
        losses = [module(x).square().mean() for module in (pair.engine, pair.plain)]
        for loss in losses:
            # As for adversarial examples.
            torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()
        found = [safe_get_full_grad(parameter) for parameter in pair.module.parameters()]
        pair.engine.step()
        average_gradients(pair.plain)
        errors.append(relative_error(found, [parameter.grad for parameter in pair.plain.parameters()]))
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    check([pair.end()])
    assert max(errors) < BOUND


@vary("stage, forward_between", [(1, False), (1, True), (2, True)])
@on_ranks(2)
def test_a_penalty_between(stage, forward_between):
    """Behind an evaluation or no_sync(), a penalty's gradients would be taken for those of another step."""
    pair = Beside(Critic(), Case(stage=stage))
    engine, plain = pair.engine, pair.plain
    for step in range(3):
        first, second = rows(step, 0), rows(step, 1)
        if not forward_between:
            with engine.no_sync():
                engine.backward(engine(first).square().mean())
            penalty_of(pair.module).backward()
            engine.backward(engine(second).square().mean())
            plain(first).square().mean().backward()
        else:
            engine.backward(engine(second).square().mean())
            pair.evaluate(first)
            penalty_of(pair.module).backward()
        engine.step()
        (plain(second).square().mean() + penalty_of(plain)).backward()
        pair.step_plain()
    check([pair.end()])


@vary("penalized", [False, True])
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 2)])
@on_ranks(2)
def test_a_step_takes_gradients_that_no_backward_has_taken(stage, accumulation, penalized):
    """A step would find nothing where the caller has called the module, so that no backward was announced."""
    pair = Beside(Critic(), Case(stage=stage, accumulation=accumulation))
    for step in range(3):
        for micro_step in range(accumulation):
            x = rows(step, micro_step)
            (pair.module(x).square().mean() / accumulation).backward()
            (pair.plain(x).square().mean() / accumulation).backward()
            if penalized:
                for module in (pair.module, pair.plain):
                    (penalty_of(module) / accumulation).backward()
            pair.engine.step()
        pair.step_plain()
    check([pair.end()])


@vary("stage", [1, 2])
@on_ranks(2)
def test_a_penalty_before_a_backward_that_replaces_another(stage):
    """A backward that replaces another would drop the gradients of a penalty that came in between, too."""
    pair = Beside(Critic(), Case(stage=stage))
    for step in range(2):
        pair.engine.backward(pair.engine(rows(step, 1)).square().mean())
        x = rows(step)
        loss = pair.engine(x).square().mean()
        penalty_of(pair.module).backward()
        pair.engine.backward(loss)
        pair.engine.step()
        (pair.plain(x).square().mean() + penalty_of(pair.plain)).backward()
        pair.step_plain()
    check([pair.end()])


@vary("direct", [True, False])
@vary("stage, backend", [(1, "eager"), (2, "eager")], slow=[(2, "inductor")])
@on_ranks(2)
def test_parameters_frozen_between_forward_and_backward(stage, backend, direct):
    """A graph would reduce the gradient of a parameter that was frozen after its forward."""
    pair = Beside(Critic(), Case(stage=stage, backend=backend))
    for step in range(3):
        x = rows(step)
        losses = [module(x).square().mean() for module in (pair.engine, pair.plain)]
        halves = [module.blocks[1] if step == 1 else module.head for module in (pair.module, pair.plain)]
        for half in halves:
            half.requires_grad_(False)
        losses[0].backward() if direct else pair.engine.backward(losses[0])
        losses[1].backward()
        for half in halves:
            half.requires_grad_(True)
        pair.engine.step()
        pair.step_plain()
    check([pair.end()])
