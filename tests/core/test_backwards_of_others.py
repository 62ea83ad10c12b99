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


def train_beside_saliency(case, places, direct):
    """Asks for gradients of inputs at ``places`` of a micro-batch: before it, before and after its backward."""
    pair = Beside(Critic(), case)
    engine, plain = pair.engine, pair.plain
    error = 0.0

    def ask(place, x):
        nonlocal error
        if place in places:
            # DeepSpeed divides the gradient of an engine's output by the number of micro-batches.
            wanted = saliency(plain, x) / case.accumulation
            error = max(error, relative_error([saliency(engine, x)], [wanted]))

    for step in range(3):
        for micro_step in range(case.accumulation):
            x = rows(step, micro_step)
            ask("before", x)
            loss = engine(x).square().mean()
            ask("between", x)
            loss.backward() if direct else engine.backward(loss)
            (plain(x).square().mean() / case.accumulation).backward()
            ask("after", x)
            engine.step()
        pair.step_plain()
    return pair.end(), error


@vary("places", [("after",), ("before", "between", "after")])
@vary("stage, accumulation, direct", [(1, 1, False), (2, 2, True), (1, 2, False), (2, 1, False), (1, 1, True)])
def test_gradients_of_inputs_belong_to_no_step(ranks, stage, accumulation, direct, places):
    """The parameters' gradients that graphs compute for an input's would be added to those of the step."""
    case = Case(stage=stage, accumulation=accumulation)
    results = ranks(2).run(train_beside_saliency, case, places, direct)
    check([result for result, _ in results])
    assert max(error for _, error in results) < BOUND


def buckets_sent_by_a_step(case):
    """Returns how many buckets a rank sends in a step, whose penalty the first rank alone has."""
    module = Critic().to(device())
    engine = make_engine(module, case)
    if dist.get_rank() == 0:
        penalty_of(module).backward()
    engine.backward(engine(rows(0)).square().mean())
    before = gradient_counters(engine)["buckets_sent"]
    engine.step()
    sent = gradient_counters(engine)["buckets_sent"] - before
    engine.destroy()
    return sent


@vary("stage", [1, 2])
def test_a_step_sends_nothing_of_a_penalty_again(ranks, stage):
    """The rank with the penalty would send buckets of zeros in its step, for which no other rank waits."""
    assert ranks(2).run(buckets_sent_by_a_step, Case(stage=stage)) == [0, 0]


def penalty_of(module):
    """Of parameters alone: no output of the engine leads to it."""
    return 0.05 * sum(parameter.square().sum() for parameter in module.parameters())


def train_with_penalty(case, first, direct):
    pair = Beside(Critic(), case)
    engine, plain = pair.engine, pair.plain
    with warnings_logged() as warnings:
        for step in range(3):
            for micro_step in range(case.accumulation):
                x = rows(step, micro_step)
                loss = None if first else engine(x).square().mean()
                (penalty_of(pair.module) / case.accumulation).backward()
                loss = engine(x).square().mean() if first else loss
                loss.backward() if direct else engine.backward(loss)
                engine.step()
                ((plain(x).square().mean() + penalty_of(plain)) / case.accumulation).backward()
            pair.step_plain()
    return pair.end(), warnings


@pytest.mark.sanitized
@vary("first", [True, False])
@vary("direct", [True, False])
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_penalty_has_a_backward_of_its_own(ranks, stage, accumulation, first, direct):
    """Gradients of a penalty would be dropped where the loss's backward replaces a step that nobody has taken."""
    results = ranks(2).run(train_with_penalty, Case(stage=stage, accumulation=accumulation), first, direct)
    check([result for result, _ in results])
    assert not any(warnings for _, warnings in results), results


# A backward that torch compiles at its first call knows that the graph is retained, and one that is loaded does not.
@compiled_anew()
def train_by_loss_backward_behind_saliency(case):
    """As for adversarial examples: the gradient of an input, and then a backward through the same output."""
    pair = Beside(Critic(), case)
    error = 0.0
    for step in range(3):
        x = rows(step).requires_grad_()
        losses = [module(x).square().mean() for module in (pair.engine, pair.plain)]
        for loss in losses:
            torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()
        found = [safe_get_full_grad(parameter) for parameter in pair.module.parameters()]
        pair.engine.step()
        average_gradients(pair.plain)
        error = max(error, relative_error(found, [parameter.grad for parameter in pair.plain.parameters()]))
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    return pair.end(), error


@vary("stage", [1, 2])
def test_a_backward_behind_one_that_passed_through(ranks, stage):
    """A graph that ran for an input's gradient would count as done when loss.backward() runs it again."""
    results = ranks(2).run(train_by_loss_backward_behind_saliency, Case(stage=stage))
    check([result for result, _ in results])
    assert max(error for _, error in results) < BOUND


def penalize_between(case, forward_between):
    """A penalty between a backward within no_sync() and the last one, or behind the last one and another forward."""
    pair = Beside(Critic(), case)
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
    return pair.end()


@vary("stage, forward_between", [(1, False), (1, True), (2, True)])
def test_a_penalty_between(ranks, stage, forward_between):
    """Behind an evaluation or no_sync(), a penalty's gradients would be taken for those of another step."""
    check(ranks(2).run(penalize_between, Case(stage=stage), forward_between))


def train_the_module_itself(case, penalized):
    """The caller calls the module and not the engine, and no backward is announced."""
    pair = Beside(Critic(), case)
    for step in range(3):
        for micro_step in range(case.accumulation):
            x = rows(step, micro_step)
            (pair.module(x).square().mean() / case.accumulation).backward()
            (pair.plain(x).square().mean() / case.accumulation).backward()
            if penalized:
                for module in (pair.module, pair.plain):
                    (penalty_of(module) / case.accumulation).backward()
            pair.engine.step()
        pair.step_plain()
    return pair.end()


@vary("penalized", [False, True])
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 2)])
def test_a_step_takes_gradients_that_no_backward_has_taken(ranks, stage, accumulation, penalized):
    """A step would find nothing where the caller has called the module, so that no backward was announced."""
    check(ranks(2).run(train_the_module_itself, Case(stage=stage, accumulation=accumulation), penalized))


def replace_after_penalty(case):
    """A penalty comes between a backward that no step uses and the backward that replaces it."""
    pair = Beside(Critic(), case)
    for step in range(2):
        pair.engine.backward(pair.engine(rows(step, 1)).square().mean())
        x = rows(step)
        loss = pair.engine(x).square().mean()
        penalty_of(pair.module).backward()
        pair.engine.backward(loss)
        pair.engine.step()
        (pair.plain(x).square().mean() + penalty_of(pair.plain)).backward()
        pair.step_plain()
    return pair.end()


@vary("stage", [1, 2])
def test_a_penalty_before_a_backward_that_replaces_another(ranks, stage):
    """A backward that replaces another would drop the gradients of a penalty that came in between, too."""
    check(ranks(2).run(replace_after_penalty, Case(stage=stage)))


def freeze_before_backward(case, direct):
    pair = Beside(Critic(), case)
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
    return pair.end()


@vary("direct", [True, False])
@vary("stage, backend", [(1, "eager"), (2, "eager"), pytest.param(2, "inductor", marks=pytest.mark.slow)])
def test_parameters_frozen_between_forward_and_backward(ranks, stage, backend, direct):
    """A graph would reduce the gradient of a parameter that was frozen after its forward."""
    check(ranks(2).run(freeze_before_backward, Case(stage=stage, backend=backend), direct))
