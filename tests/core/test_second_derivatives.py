# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``create_graph=True`` through an engine: compiled code has no second derivatives, and the engine says what to do."""

import contextlib

import pytest
import torch

from support.beside import Beside, check
from support.critic import Critic, rows
from support.ids import vary
from support.training import BOUND, Case


def penalty(module, x):
    """The gradient penalty of a critic: how far the norm of its gradient is from one."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def train(case):
    """Trains with a penalty from the second step on. Returns what the engine says if the caller does nothing else."""
    torch.manual_seed(0)
    pair = Beside(Critic(), case)
    told = []
    for step in range(3):
        for micro_step in range(case.accumulation):
            x = rows(step, micro_step)
            if step == 1:
                try:
                    penalty(pair.engine, x)
                except RuntimeError as error:
                    told.append(str(error))
            with torch.compiler.set_stance("force_eager") if step else contextlib.nullcontext():
                loss = pair.engine(x).square().mean()
                pair.engine.backward(loss + (penalty(pair.module, x) if step else 0))
            pair.engine.step()
            loss = pair.plain(x).square().mean()
            ((loss + (penalty(pair.plain, x) if step else 0)) / case.accumulation).backward()
        pair.step_plain()
    return pair.end(), told


@pytest.mark.follows("code that DeepCompile has compiled has none; run this forward and its backward in")
@vary(
    "stage, accumulation, backend",
    [pytest.param(1, 1, "inductor", marks=pytest.mark.slow), (1, 1, "eager"), (2, 2, "eager")],
)
def test_the_engine_says_what_to_do_and_that_is_right(ranks, stage, accumulation, backend):
    """The remedy that the error names would leave gradients to a graph that does not run, or count them twice."""
    case = Case(stage=stage, accumulation=accumulation, backend=backend)
    results = ranks(2).run(train, case)
    check([outcome for outcome, _ in results])
    for _, told in results:
        assert len(told) == accumulation
        assert "torch.compiler.set_stance('force_eager')" in told[0]


def ask_for_parameters(case):
    """Asks for a differentiable gradient of a parameter: what it raises, and how far off the remedy's answer is."""
    pair, told = Beside(Critic(), case), ""

    def gradient(module):
        (of_weight,) = torch.autograd.grad(module(rows(0)).sum(), module.head.weight, create_graph=True)
        return of_weight

    expected = gradient(pair.plain)
    try:
        # The engine is not asked, and does not answer.
        gradient(pair.module)
    except RuntimeError as error:
        told = str(error)
    with torch.compiler.set_stance("force_eager"):
        actual = gradient(pair.module)
    pair.engine.destroy()
    return told, float((actual - expected).norm() / expected.norm()), actual.requires_grad


@pytest.mark.follows("which has no second derivatives; run this forward and its backward in")
def test_parameters_of_a_module_that_is_called_directly(ranks):
    """A graph's gradient would be returned as a constant, whose second derivative is silently zero."""
    ((told, error, can_be_differentiated),) = ranks(1).run(ask_for_parameters, Case())
    assert "'head.weight'" in told and "torch.compiler.set_stance('force_eager')" in told
    assert error < BOUND and can_be_differentiated
