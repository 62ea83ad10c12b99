# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What is computed again draws the random numbers of the first time, whatever is compiled.

Generated code draws other numbers than torch does uncompiled, so no plain loop can tell what is right. The loss is
linear in each parameter: the product of a parameter and its gradient, summed up, is the loss.
"""

import copy

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.utils import safe_get_full_grad

from support.ids import vary
from support.on_ranks import on_ranks
from support.recipes import Gain
from support.training import BOUND, Case, Started, device, make_engine, relative_error

WIDTH = 64


class Drops(nn.Module):
    """Multiplies by a parameter and drops half. Counts the calls that run uncompiled."""

    always = False
    eager_calls = 0

    def __init__(self):
        super().__init__()
        self.gain = Gain(WIDTH)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            Drops.eager_calls += 1
        return F.dropout(self.gain(x), 0.5, training=self.training or self.always)


class AlwaysDrops(Drops):
    """The same in evaluation mode."""

    always = True


@torch.library.custom_op("deepcompile_tests::draw_like", mutates_args=())
def draw_like(x: torch.Tensor) -> torch.Tensor:
    """Draws, which no tag says."""
    return torch.rand_like(x)


@draw_like.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("deepcompile_tests::draw_into", mutates_args=["out"])
def draw_into(out: torch.Tensor) -> None:
    """Draws into memory that it is given."""
    out.uniform_()


class DrawsLike(Drops):
    """Multiplies by what an operator of somebody else has drawn."""

    def forward(self, x):
        return self.gain(x) * draw_like(x.detach())


class DrawsInto(Drops):
    """The same, where the operator changes a tensor: Dynamo wraps it in a higher-order operator."""

    def forward(self, x):
        drawn = torch.empty_like(x)
        draw_into(drawn)
        return self.gain(x) * drawn


def run_reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def run_non_reentrant(block, x):
    return checkpoint(block, x, use_reentrant=False)


def run_deepspeeds(block, x):
    return deepspeed.checkpointing.checkpoint(block, x)


class Layers(nn.Module):
    def __init__(self, block, run):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.run = run

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x


class Representation(nn.Module):
    """Blocks within the model, so that each is a graph of its own by default."""

    def __init__(self, block=Drops, run=nn.Module.__call__):
        super().__init__()
        self.layers = Layers(block, run)

    def forward(self, x):
        return self.layers(x)


class Loss(Representation):
    def forward(self, x):
        return super().forward(x).mean()


def make(module, **varied):
    """Makes an engine of a module, with random numbers of each rank's own."""
    torch._dynamo.reset()
    torch.manual_seed(1 + dist.get_rank())
    module = module.to(device())
    Drops.eager_calls = 0
    return Started(module, make_engine(module, Case(**{"backend": "inductor", **varied})))


def inputs():
    # Reentrant checkpointing wants an input that needs a gradient.
    return torch.rand(8, WIDTH, device=device()).requires_grad_()


def deviations(module, loss):
    """By how much of it each parameter's product with its gradient, summed up, differs from the mean loss."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
    products = [safe_get_full_grad(parameter) * parameter.detach() for parameter in module.parameters()]
    return [abs(float(product.sum() / loss) - 1) for product in products]


def train(run, block=Drops, regional=None, evaluation_mode=False, budget=None, backend="inductor"):
    """Trains under checkpointing, or within a budget for activations, and compares gradients with the loss.

    Returns how many gradients graphs reduced in the last backward.
    """
    config = {"compile": {"regional_compilation": regional, "activation_memory_budget": budget}}
    module, engine = make(Loss(block, run), config=config, backend=backend)
    if evaluation_mode:
        engine.eval()
    for _ in range(3):
        loss = engine(inputs())
        engine.backward(loss)
        assert all(deviation < BOUND for deviation in deviations(module, loss))
        engine.step()
    from_graphs = gradient_counters(engine)["from_graphs"]
    engine.destroy()
    return from_graphs


@vary(
    "varied",
    [{"run": run_reentrant}],
    slow=[
        {"run": run_reentrant, "regional": False},
        {"run": run_non_reentrant},
        {"run": run_deepspeeds},
        {"run": run_reentrant, "block": AlwaysDrops, "evaluation_mode": True},
    ],
)
@on_ranks(1)
def test_checkpointed(varied):
    """What a checkpoint computes again would be generated code where its first run was not, or the other way."""
    assert train(**varied) == 6
    # What runs under the checkpoint's no_grad is compiled as what is computed again.
    assert Drops.eager_calls == 0


@pytest.mark.options("compile.activation_memory_budget")
@vary(
    "varied",
    [
        {"budget": 0.5, "backend": "eager"},
        {"budget": 0, "backend": "eager", "regional": False},
        {"budget": 0, "block": DrawsLike, "backend": "eager", "regional": False},
        {"budget": 0, "block": DrawsInto, "backend": "eager"},
    ],
    slow=[
        {"budget": 0.5},
        {"budget": 0, "regional": False},
        {"budget": 0, "run": run_non_reentrant, "regional": False},
        {"budget": 0, "block": DrawsLike, "regional": False},
        {"budget": 0.5, "block": DrawsInto},
    ],
)
@on_ranks(1)
def test_within_a_budget_for_activations(varied):
    """A budget would have the backward draw again what the forward drew, by torch's operator or one of others."""
    assert train(**{"run": nn.Module.__call__, **varied}) == 6


class CheckpointsInside(nn.Module):
    """Checkpoints a part of itself that drops half. The caller freezes it."""

    def __init__(self):
        super().__init__()
        self.drops = Drops()

    def forward(self, x):
        return x + checkpoint(self.drops, x, use_reentrant=False)


@vary("backend", ["eager"], slow=["inductor"])
@on_ranks(1)
def test_frozen_blocks_that_checkpoint_inside(backend):
    """Torch looks for what a graph without gradients computes again, and raises where that draws random numbers."""
    module = Loss(CheckpointsInside, nn.Module.__call__)
    module.layers.blocks[0].requires_grad_(False)
    plain = copy.deepcopy(module).to(device())
    module, engine = make(module, config={"compile": {"regional_compilation": True}}, backend=backend)
    x = torch.rand(8, WIDTH, device=device())
    losses = []
    for model, backward in ((engine, engine.backward), (plain, torch.Tensor.backward)):
        torch.manual_seed(1)
        # Generated code shall draw the random numbers that torch draws.
        with torch._inductor.config.patch(fallback_random=True):
            losses.append(model(x))
            backward(losses[-1])
    weights = [model.layers.blocks[1].drops.gain.weight for model in (module, plain)]
    gradients = safe_get_full_grad(weights[0]), weights[1].grad
    from_graphs = gradient_counters(engine)["from_graphs"]
    engine.destroy()
    assert relative_error([losses[0], gradients[0]], [losses[1], gradients[1]]) < BOUND
    assert from_graphs == 1


@vary("regional", [True], slow=[False])
@on_ranks(1)
def test_replayed_after_a_pass_without_gradients(regional):
    """A pass without gradients would run uncompiled, and draw other numbers than the same pass with them."""
    module, engine = make(Representation(), config={"compile": {"regional_compilation": regional}})
    for step in range(3):
        x = inputs()
        # As GradCache does.
        torch.manual_seed(10 * step + dist.get_rank())
        with torch.no_grad():
            first = engine(x)
        torch.manual_seed(10 * step + dist.get_rank())
        second = engine(x)
        assert float((first - second).abs().max()) < BOUND
        engine.backward((second * first).mean())
        engine.step()
    from_graphs = gradient_counters(engine)["from_graphs"]
    engine.destroy()
    assert (from_graphs, Drops.eager_calls) == (6, 0)


def losses(evaluates):
    """The losses of training that evaluates between its steps, or does not."""
    _, engine = make(Loss())
    seen = []
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        x = inputs()
        if evaluates and step != 1:
            engine.eval()
            with torch.no_grad():
                engine(x)
            engine.train()
        loss = engine(x)
        seen.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return seen


def test_evaluation_draws_nothing(ranks):
    """An evaluation between steps would use up random numbers, so that training depends on it."""
    assert ranks(1).run(losses, True) == ranks(1).run(losses, False)
