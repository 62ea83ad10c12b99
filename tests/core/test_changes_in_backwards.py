# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a caller's hook changes while a backward runs, and what a caller's default device changes in a forward."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from support.beside import Beside, check
from support.ids import vary
from support.models import VOCABULARY
from support.on_ranks import on_ranks
from support.training import Case, batch, build


class Watched(nn.Module):
    """Calls ``in_backward()`` half way through a backward. Graphs reduce some gradients, and autograd the others.

    The parameters of ``inside`` are used on both sides of that moment.
    """

    def __init__(self, width=6):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.inside, self.outside = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.in_backward = None

    def forward(self, ids):
        x = torch.tanh(self.inside(torch.tanh(self.inside(self.embedding(ids)))))
        x = torch.tanh(self.inside(self.uncompiled(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    @torch.compiler.disable
    def uncompiled(self, x):
        x = torch.tanh(self.outside(x))
        if self.in_backward is not None:
            x.register_hook(lambda _: self.in_backward())
        return x


def train(case, change, of_plain):
    """Calls ``change(engine)`` half way through each backward but the first, and ``of_plain(module)`` beside it."""
    torch.manual_seed(0)
    pair = Beside(Watched(), case)
    for step in range(3):
        if step == 1:
            pair.module.in_backward = lambda: change(pair.engine)
            pair.plain.in_backward = lambda: of_plain(pair.plain)
        for micro_step in range(case.accumulation):
            pair.micro_batch(batch(step, micro_step, dist.get_rank(), 4))
        pair.step_plain()
    return pair.end()


def give_other_memory(engine):
    for parameter in engine.module.parameters():
        parameter.data = parameter.data.clone()


def nothing(module):
    pass


@pytest.mark.sanitized
@vary("stage, accumulation", [(1, 1), (2, 2), (1, 2)])
def test_parameters_get_other_memory(ranks, stage, accumulation):
    """The reducer would know a parameter by its memory, and lose gradients behind a hook that changes it."""
    check(ranks(2).run(train, Case(stage=stage, accumulation=accumulation), give_other_memory, nothing))


def add_to_gradients(model):
    """A penalty on parameters, added by hand. An engine's ``module`` and the plain loop's model have the same."""
    for parameter in getattr(model, "module", model).parameters():
        penalty = 0.1 * parameter.detach()
        parameter.grad = penalty if parameter.grad is None else parameter.grad + penalty


@pytest.mark.sanitized
@vary("stage, accumulation", [(1, 1), (2, 2), (1, 2)])
def test_a_hook_adds_to_gradients(ranks, stage, accumulation):
    """What a hook has written to ``parameter.grad`` would be lost where the backward's gradients come there too."""
    check(ranks(2).run(train, Case(stage=stage, accumulation=accumulation), add_to_gradients, add_to_gradients))


def zero_grad_of_engine(engine):
    engine.zero_grad()


def zero_grad_of_optimizer(engine):
    engine.optimizer.zero_grad()


@pytest.mark.follows("on their way to other ranks; call it when the backward has ended")
@pytest.mark.sanitized
@vary("drop", [zero_grad_of_engine, zero_grad_of_optimizer])
@vary("bucket", [1, 40])
@vary("stage", [1, 2])
@on_ranks(2)
def test_a_hook_drops_gradients(stage, bucket, drop):
    """A step would be taken with the half of the gradients that came after the hook had dropped the others."""
    pair = Beside(Watched(), Case(stage=stage, bucket=bucket))
    for step in range(3):
        ids = batch(step, 0, dist.get_rank(), 4)
        if step == 1:
            pair.module.in_backward = lambda: drop(pair.engine)
            with pytest.raises(RuntimeError, match="call it when the backward has ended"):
                pair.engine.backward(pair.engine(ids))
            # As the error says: the backward has ended.
            drop(pair.engine)
            pair.module.in_backward = None
        else:
            pair.step(ids)
    check([pair.end()])


@vary("device", ["meta", "cpu"])
@vary("stage, backend", [(1, "eager")], slow=[(2, "inductor")])
@on_ranks(2)
def test_a_default_device_in_the_first_forward(stage, backend, device):
    """Tensors that the passes make while they compile would be made on the caller's default device."""
    # One graph serves several blocks.
    case = Case("RepeatedLayers", stage=stage, backend=backend)
    pair = Beside(build(case), case)
    for step in range(3):
        ids = batch(step, 0, dist.get_rank(), 4)
        with torch.device(device) if step == 0 else contextlib.nullcontext():
            loss = pair.engine(ids)
        pair.engine.backward(loss)
        pair.engine.step()
        pair.plain(ids).backward()
        pair.step_plain()
    check([pair.end()])
