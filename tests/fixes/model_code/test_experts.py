# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's layers of experts, whose parameters have process groups of their own."""

import dataclasses
import os
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import deepspeed
from deepspeed.compile.zero_1_and_2 import gradient_counters, wait_for_parameters
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

from support.ids import vary
from support.options import outcome
from support.training import OVERLAPPED, Case, device, forget_autocast, make_engine

SLOW = pytest.mark.slow
WIDTH = 8


class Block(nn.Module):
    """A dense layer, and experts."""

    def __init__(self, experts, on_ranks):
        super().__init__()
        self.dense = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.back = nn.Linear(2 * WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        # Tokens beyond an expert's capacity are dropped by their place, and not by chance.
        self.experts = MoE(WIDTH, expert, experts, on_ranks, k=1, min_capacity=2, use_rts=False)

    def forward(self, x):
        x = x + self.back(self.dense(x))
        mixed, balance, _ = self.experts(x)
        return x + mixed, balance


class Mixture(nn.Module):
    def __init__(self, experts, on_ranks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(experts, on_ranks) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(x).square().mean() + 0.01 * sum(balances)


def tokens(step, micro_step):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_step + dist.get_rank())
    return torch.randn(2, 6, WIDTH, generator=generator).to(device())


def make(case, on_ranks, experts=4):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Mixture(experts, on_ranks).to(device())
    # Each rank's experts differ.
    for index, parameter in enumerate(module.parameters()):
        if getattr(parameter, "group_name", None):
            with torch.no_grad():
                torch.manual_seed(1 + index + 1000 * (dist.get_rank() % on_ranks))
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    forget_autocast()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(module.parameters()), "name": "all"})
    make_optimizer = torch.optim.AdamW if case.adam else torch.optim.SGD
    return module, make_engine(module, case, optimizer=make_optimizer(groups, lr=0.05))


def train(module, engine, case, first, last):
    losses = []
    for step in range(first, last):
        for micro_step in range(case.accumulation):
            loss = engine(tokens(step, micro_step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in module.parameters()], engine.get_global_grad_norm()


def off_and_on(make, case, on_ranks, folder):
    """Returns differences between a run without DeepCompile and one with it, and between two with it that resume.

    A new engine resumes from the checkpoint of the run without DeepCompile, and then from that of the run with it.
    """
    module, engine = make(dataclasses.replace(case, deepcompile=False), on_ranks)
    off = train(module, engine, case, 0, 2)
    engine.save_checkpoint(folder)
    off_later = train(module, engine, case, 2, 4)
    engine.destroy()
    module, engine = make(case, on_ranks)
    on = train(module, engine, case, 0, 2)
    saved = os.path.join(folder, "on")
    engine.save_checkpoint(saved)
    counters = gradient_counters(engine)
    held = counters["bound"] + counters["pending"] + counters["unreduced"]
    engine.destroy()
    found = [apart(on, off)]
    # One engine loads both, because each engine compiles anew. It has trained on when it loads the second.
    module, engine = make(case, on_ranks)
    for checkpoint in (folder, saved):
        engine.load_checkpoint(checkpoint)
        found.append(apart(train(module, engine, case, 2, 4), off_later))
    engine.destroy()
    return found, counters["from_graphs"], held


def apart(some, others):
    values = max(float((one - other).abs().max()) for one, other in zip(some[1], others[1], strict=True))
    losses = max(abs(one - other) for one, other in zip(some[0], others[0], strict=True))
    return values, losses, abs(some[2] - others[2])


def check_off_and_on(pool, make, case, on_ranks, folder):
    try:
        results = pool.run(off_and_on, make, case, on_ranks, str(folder))
    finally:
        # Process groups of experts stay for the life of a process.
        pool.stop()
    for found, from_graphs, held in results:
        for values, losses, norms in found:
            assert values < 1e-5 and losses < 1e-5 and norms < 1e-4
        assert from_graphs > 0 and held == 0


@pytest.mark.options("expert_parallel")
@vary(
    "world, on_ranks, case",
    [(2, 2, Case(stage=1, accumulation=2, clipping=0.1, config=OVERLAPPED)), (2, 1, Case(stage=2, adam=True))],
    slow=[
        (2, 2, Case(stage=2, adam=True, accumulation=2, backend="inductor")),
        (2, 1, Case(stage=1, adam=True, offloaded=True)),
        (4, 2, Case(stage=1, adam=True, clipping=0.1)),
        (4, 2, Case(stage=2, accumulation=2, config=OVERLAPPED)),
    ],
)
def test_experts_train_as_without_deepcompile(ranks, tmp_path, world, on_ranks, case):
    """Experts' gradients would be averaged with those of other experts, or divided by too few ranks."""
    check_off_and_on(ranks(world), make, case, on_ranks, tmp_path)


class FusedExperts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(count, 4 * WIDTH, WIDTH))
        self.down_proj = nn.Parameter(0.2 * torch.randn(count, WIDTH, 2 * WIDTH))


class LikeMixtrals(nn.Module):
    """Has what AutoEP looks for. DeepSpeed 0.19.8 cannot replace the layers of the newest transformers' Mixtral."""

    def __init__(self, count):
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = FusedExperts(count)


class Layer(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.mlp = LikeMixtrals(count)

    def forward(self, x):
        x = x + self.dense(x).tanh()
        return x + self.mlp(x)


class Body(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(Layer(count) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class ForAutoEP(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.config = types.SimpleNamespace(
            model_type="mixtral", num_local_experts=count, num_experts_per_tok=2, hidden_size=WIDTH
        )
        self.model = Body(count)

    def forward(self, x):
        return self.model(x).square().mean()


def make_for_auto_ep(case, on_ranks):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = ForAutoEP().to(device())
    config = {
        **(case.config or {}),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "expert_parallel": {"enabled": True, "autoep_size": on_ranks, "preset_model": "mixtral"},
    }
    engine = make_engine(module, dataclasses.replace(case, config=config), model_parameters=[*module.parameters()])
    return engine.module, engine


@pytest.mark.options("expert_parallel")
@vary(
    "world, case",
    [(2, Case(stage=2, clipping=0.1))],
    slow=[
        (2, Case(stage=1, accumulation=2, config=OVERLAPPED)),
        (2, Case(stage=2, accumulation=3, clipping=0.1, backend="inductor")),
        (4, Case(stage=1, clipping=0.1)),
        (4, Case(stage=2, accumulation=2, clipping=0.1)),
    ],
)
def test_auto_ep_trains_as_without_deepcompile(ranks, tmp_path, world, case):
    """Experts would be averaged with those of the other rank, and resume with their states."""
    check_off_and_on(ranks(world), make_for_auto_ep, case, 2, tmp_path)


def train_where_one_rank_overflows(make, case):
    """Returns what each step left, and the parameters, where one rank's experts overflow in two of five steps."""
    module, engine = make(case, 2)
    experts = [parameter for parameter in module.parameters() if getattr(parameter, "group_name", None)]
    overflows, steps = False, []
    if dist.get_rank() == 1:
        experts[-1].register_hook(lambda gradient: gradient * float("inf") if overflows else gradient)
    for step in range(5):
        overflows = step in (1, 2)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        engine.backward(engine(tokens(step, 0).half()))
        engine.step()
        if case.deepcompile:
            wait_for_parameters(engine)
        unchanged = all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
        steps.append((engine.skipped_steps, engine.optimizer.loss_scale, unchanged))
    values = [parameter.detach().float() for parameter in module.parameters()]
    engine.destroy()
    return steps, values


def overflows_off_and_on(make, case):
    steps_off, off = train_where_one_rank_overflows(make, dataclasses.replace(case, deepcompile=False))
    steps, on = train_where_one_rank_overflows(make, case)
    return steps, steps_off, max(float((one - other).abs().max()) for one, other in zip(on, off, strict=True))


@SLOW
@vary("world, make, stage", [(2, make, 1), (2, make_for_auto_ep, 2), (4, make, 2), (4, make_for_auto_ep, 1)])
def test_experts_of_one_rank_overflow(ranks, world, make, stage):
    """The other ranks would step, or go on with another loss scale."""
    try:
        results = ranks(world).run(overflows_off_and_on, make, Case(stage=stage, dtype="fp16"))
    finally:
        ranks(world).stop()
    for steps, steps_off, difference in results:
        assert steps == steps_off == results[0][0]
        assert [skipped for skipped, _, _ in steps] == [0, 1, 2, 2, 2] and steps[-1][1] < steps[0][1]
        assert [unchanged for *_, unchanged in steps] == [False, True, True, False, False]
        assert difference < 2e-3


def made_with_muon(deepcompile=True):
    module = Mixture(2, 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
        "compile": {"deepcompile": deepcompile},
    }
    parameters = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(module.parameters()), "name": "all"}
    )
    return outcome(deepspeed.initialize, model=module, model_parameters=parameters, config=config)


@pytest.mark.follows("which have process groups of their own; use AdamW, or set compile.deepcompile to false")
def test_muon_is_refused(ranks):
    """Muon would look for matrices in the partitions of all ranks."""
    try:
        (said,) = ranks(1).run(made_with_muon)
        # As is advised.
        assert ranks(1).run(made_with_muon, deepcompile=False) == [None]
    finally:
        ranks(1).stop()
    assert said == (
        "ValueError: DeepCompile with ZeRO stage 1: Muon is not supported with experts, which have process groups of "
        "their own; use AdamW, or set compile.deepcompile to false"
    )


def made_with_offload():
    return outcome(make, Case(adam=True, offloaded=True), 2)


@pytest.mark.follows("is not supported where each expert lies on one rank; leave it out")
def test_experts_of_one_rank_on_the_host_are_refused(ranks):
    """Their gradients would fill buckets at other places on other ranks."""
    try:
        said = ranks(2).run(made_with_offload)
    finally:
        ranks(2).stop()
    assert all("offload_optimizer is not supported where each expert lies on one rank" in text for text in said)


def resumed_with_other_ranks(folder):
    case = Case(stage=1)
    module, engine = make(case, 2)
    train(module, engine, case, 0, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    said = []
    for on_ranks in (1, 2):
        engine = make(case, on_ranks)[1]
        said.append(outcome(engine.load_checkpoint, folder))
        engine.destroy()
    return said


@pytest.mark.follows("load it with the same ep_size or autoep_size")
def test_experts_that_lay_on_other_ranks(ranks, tmp_path):
    """A rank's part has the same size for any ep_size, and would get master weights of other experts."""
    try:
        answers = ranks(2).run(resumed_with_other_ranks, str(tmp_path))
    finally:
        ranks(2).stop()
    for refused, loaded in answers:
        assert "each expert of parameter group 1 lay on 1 ranks when the checkpoint was saved" in refused
        assert loaded is None


@pytest.mark.quick
def test_groups_of_experts_have_an_order():
    """The order of a set of names is another one in each process: ranks would reduce different parameters as one."""
    parameters = []
    for size in range(2, 40):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.allreduce, parameter.group_name = False, f"ep_size_{size}"
        parameters.append(parameter)
    found = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    names = [group["name"] for group in found if group.get("moe")]
    assert len(names) == 38 and names == sorted(names)
