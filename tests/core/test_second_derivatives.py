# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``create_graph=True`` through an engine: compiled code has no second derivatives, and the engine says what to do."""

import contextlib
import re

import pytest
import torch

from support.beside import Beside, check
from support.critic import Critic, rows
from support.ids import vary
from support.on_ranks import on_ranks
from support.training import BOUND, Case


def penalty(module, x):
    """The gradient penalty of a critic: how far the norm of its gradient is from one."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


@pytest.mark.follows("code that DeepCompile has compiled has none; run this forward and its backward in")
@vary("stage, accumulation, backend", [(1, 1, "eager"), (2, 2, "eager")], slow=[(1, 1, "inductor")])
@on_ranks(2)
def test_the_engine_says_what_to_do_and_that_is_right(stage, accumulation, backend):
    """The remedy that the error names would leave gradients to a graph that does not run, or count them twice."""
    pair = Beside(Critic(), Case(stage=stage, accumulation=accumulation, backend=backend))
    for step in range(3):
        for micro_step in range(accumulation):
            x = rows(step, micro_step)
            if step == 1:
                with pytest.raises(RuntimeError, match=re.escape("torch.compiler.set_stance('force_eager')")):
                    penalty(pair.engine, x)
            with torch.compiler.set_stance("force_eager") if step else contextlib.nullcontext():
                loss = pair.engine(x).square().mean()
                pair.engine.backward(loss + (penalty(pair.module, x) if step else 0))
            pair.engine.step()
            loss = pair.plain(x).square().mean()
            ((loss + (penalty(pair.plain, x) if step else 0)) / accumulation).backward()
        pair.step_plain()
    check([pair.end()])


@pytest.mark.follows("which has no second derivatives; run this forward and its backward in")
@on_ranks(1)
def test_parameters_of_a_module_that_is_called_directly():
    """A graph's gradient would be returned as a constant, whose second derivative is silently zero."""
    pair = Beside(Critic(), Case())

    def gradient(module):
        (of_weight,) = torch.autograd.grad(module(rows(0)).sum(), module.head.weight, create_graph=True)
        return of_weight

    expected = gradient(pair.plain)
    # The engine is not asked, and does not answer.
    with pytest.raises(RuntimeError, match=r"'head\.weight'.*torch\.compiler\.set_stance\('force_eager'\)"):
        gradient(pair.module)
    with torch.compiler.set_stance("force_eager"):
        actual = gradient(pair.module)
    pair.engine.destroy()
    assert float((actual - expected).norm() / expected.norm()) < BOUND and actual.requires_grad
