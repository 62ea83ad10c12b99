# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that a model calls twice, or in another order than it registers them, train to the bits of whole ones."""

import contextlib
import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.features.shard_parameters import keep, unsharded_parameters

from support.frozen import WIDTH, Adapted, AdaptedBlock, Body
from support.graph_cache import shapes_no_graph
from support.ids import vary
from support.on_ranks import on_ranks
from support.sharded import SHARDED, end, engine_of, same, section, units_at_rest
from support.training import BOUND, Case, batch, device, make_engine, relative_error

LAYER = "L"  # stands for a large layer beside the blocks


class InOrder(Body):
    """Calls its four blocks, and a large layer, in an order of its own.

    Args:
        order: digits of blocks, and ``LAYER``.
        place: how many blocks the model registers before the layer.
        checkpointed: None, or whether activations are checkpointed reentrantly.
    """

    def __init__(self, order, place, checkpointed):
        super().__init__()
        layers = dict(zip("0123", self.blocks))
        if LAYER in order:
            layers[LAYER] = nn.Linear(WIDTH, WIDTH, bias=False)
            self.blocks.insert(place, layers[LAYER])
        # A tuple registers no modules.
        self.called, self.checkpointed = tuple(layers[key] for key in order), checkpointed

    def run(self, x, skip):
        for layer in self.called:
            if self.checkpointed is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x.requires_grad_(), use_reentrant=self.checkpointed)
        return x


def train(options, order, place=4, checkpointed=None, trains_all=True, holds=False, before=None, steps=3, **case):
    """Returns losses and parameters, and how many units were at rest.

    Args:
        holds: whether steps run in a context in which the first two blocks are whole.
        before: called before each step with its number, and a parameter of the block that is called first.
    """

    def build():
        module = Adapted()
        module.body = InOrder(order, place, checkpointed)
        return module

    trained = "all" if trains_all else "adapters"
    module, engine = engine_of(build, section(None, **options), trained, adam=False, **case)
    losses = []
    held = [block.up.weight for block in module.body.called[:2]] if holds else []
    for step in range(steps):
        if before is not None:
            before(step, module.body.called[0].up.weight)
        with unsharded_parameters(engine, held) if holds else contextlib.nullcontext():
            loss = engine(batch(step, 0, dist.get_rank(), 4))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    at_rest = units_at_rest(engine)
    return [*losses, *end(engine, module)], at_rest


def compare(shards, order, kept=None, **case):
    """Trains with sharded and with whole parameters, to the same bits. Returns how many units were at rest."""
    # The host has no memory to spare, as far as "fit" knows.
    with mock.patch.object(keep, "spare_memory", shapes_no_graph(lambda device: 5000)):
        sharded, at_rest = train(
            {"shard_parameters": shards, "keep_gathered": kept}, order, trains_all=shards == "all", **case
        )
    whole, _ = train({}, order, trains_all=shards == "all", **case)
    assert same(sharded, whole)
    return at_rest


@pytest.mark.options("compile.shard_parameters")
@pytest.mark.table
@vary("shards", ["all", "frozen"])
@vary("order", ["01323", "0L1L2L3L"], slow=["3210", "00112233", "203102", "L01L23L"])
@vary(
    "case",
    [{"stage": 2}, {"stage": 1, "kept": 2, "checkpointed": False, "place": 0}],
    slow=[{"stage": 2, "kept": "fit", "place": 2}, {"stage": 2, "checkpointed": True}],
)
@on_ranks(2)
def test_blocks_called_again_or_out_of_order(shards, order, case):
    """A backward would give back the block that it reads, to make room for the next one."""
    assert compare(shards, order, **case) >= 4


@on_ranks(2)
def test_a_backward_beside_blocks_that_are_held():
    """Blocks that stay leave no room for others, so the next one would take the place of the one that is read."""
    compare("all", "0123", stage=1, holds=True)


def double(parameter):
    parameter.register_hook(lambda gradient: gradient * 2)


def drop(parameter):
    parameter.register_post_accumulate_grad_hook(lambda hooked: setattr(hooked, "grad", None))


@pytest.mark.table
@vary("order", ["0120"], slow=["00123", "0102030", "0L10"])
@vary("rank", [0, 1])
@vary("hook", [double, drop])
@vary("bucket", [150], slow=[1, 40])
@vary("hooked", [1], slow=[0])
@vary("checkpointed", [None, True])
@on_ranks(2)
def test_a_hook_on_one_rank_alone(order, rank, hook, bucket, hooked, checkpointed):
    """That rank would wait for a block while the others, whose buckets are full, wait for its gradients."""

    def on_one_rank(step, parameter):
        if step == hooked and dist.get_rank() == rank:
            hook(parameter)

    assert compare("all", order, before=on_one_rank, stage=2, bucket=bucket, checkpointed=checkpointed) >= 4


@pytest.mark.table
@vary("order", ["0120"], slow=["00123", "0102030"])
@vary("rank", [0, 1])
@vary("bucket", [40], slow=[1, 150])
@on_ranks(2, timeout=100)
def test_a_rank_that_runs_uncompiled(order, rank, bucket):
    """That rank gets one gradient where graphs give others two. It would wait for a block, and others for the sum."""
    if torch.cuda.is_available() and order == "0120":
        pytest.skip("on GPUs both ranks hang, as the page of limits says")

    def on_one_rank(step, parameter):
        torch.compiler.set_stance("force_eager" if step == 1 and dist.get_rank() == rank else "default")

    try:
        assert compare("all", order, before=on_one_rank, stage=2, bucket=bucket) >= 4
    finally:
        torch.compiler.set_stance("default")


class Between(nn.Module):
    """Blocks alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(4))
        self.requires_grad_(True)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def one_backward_of_two(shards, uncompiled):
    """An engine is called before and behind another one, in one backward. One rank runs uncompiled in one step.

    Returns the losses of three steps.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    around, between = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device()), Between().to(device())
    outer = make_engine(around, Case(adam=True, stage=2, bucket=40))
    inner = make_engine(between, Case(adam=True, stage=2, bucket=40, config=section(shards)))
    losses = []
    for step in range(3):
        eager = step == uncompiled and dist.get_rank() == 0
        torch.compiler.set_stance("force_eager" if eager else "default")
        torch.manual_seed(10 * step + dist.get_rank())
        loss = outer(inner(outer(torch.randn(2, WIDTH, device=device())))).square().mean()
        loss.backward()
        outer.step()
        inner.step()
        losses.append(loss.detach())
    torch.compiler.set_stance("default")
    for engine in (inner, outer):
        engine.destroy()
    return losses


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs ranks raise if one of them alone runs uncompiled")
@on_ranks(2, timeout=100)
def test_one_backward_of_a_sharded_engine_and_another_one():
    """A rank would wait for a block of one engine, and the other rank for a bucket of the other engine."""
    assert relative_error(one_backward_of_two("all", 1), one_backward_of_two(None, None)) < BOUND


class Meets(torch.autograd.Function):
    """Changes nothing. Ranks wait for each other in its backward, in a process group of its own."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        dist.barrier(ctx.group)
        return gradient, None


class Meeting(nn.Module):
    """Layers between which ranks wait for each other in the backward."""

    def __init__(self, group):
        super().__init__()
        self.first, self.last, self.group = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), group

    @torch.compiler.disable
    def meet(self, x):
        return Meets.apply(x, self.group)

    def forward(self, x):
        return self.last(self.meet(self.first(x)))


def sharded_engine():
    return make_engine(Between().to(device()), Case(adam=True, stage=2, bucket=40, config=SHARDED))


@on_ranks(2, timeout=100)
def test_an_engine_that_one_rank_has_collected():
    """That rank would send a bucket, and the other one, which holds the bucket, would wait for it elsewhere."""
    # One rank has collected an earlier engine that shards parameters, which nobody destroyed, and another has not.
    kept = [sharded_engine()]
    if dist.get_rank():
        kept.clear()
        gc.collect()
    engine = make_engine(Meeting(dist.new_group()).to(device()), Case(adam=True, stage=2, bucket=40))
    loss = engine(torch.randn(2, WIDTH, device=device())).square().mean()
    engine.backward(loss)
    engine.step()
    engine.destroy()
    for engine in kept:
        engine.destroy()
