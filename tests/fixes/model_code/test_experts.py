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
from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

from support.ids import vary
from support.on_ranks import on_ranks
from support.options import outcome
from support.training import OVERLAPPED, Case, device, forget_autocast, make_engine

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


def apart(some, others):
    values = max(float((one - other).abs().max()) for one, other in zip(some[1], others[1], strict=True))
    losses = max(abs(one - other) for one, other in zip(some[0], others[0], strict=True))
    return values, losses, abs(some[2] - others[2])


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
# Process groups of experts stay for the life of a process.
@on_ranks("world", stop=True)
def test_experts_train_as_without_deepcompile(tmp_path, world, on_ranks, case):
    """Experts' gradients would be averaged with those of other experts, or divided by too few ranks."""
    folder = str(tmp_path)
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
    engine.destroy()
    found = [apart(on, off)]
    # One engine loads both, because each engine compiles anew. It has trained on when it loads the second.
    module, engine = make(case, on_ranks)
    for checkpoint in (folder, saved):
        engine.load_checkpoint(checkpoint)
        found.append(apart(train(module, engine, case, 2, 4), off_later))
    engine.destroy()
    for values, losses, norms in found:
        assert values < 1e-5 and losses < 1e-5 and norms < 1e-4
    assert counters["from_graphs"] > 0
    assert counters["bound"] + counters["pending"] + counters["unreduced"] == 0


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


class ForAutoEP(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.config = types.SimpleNamespace(
            model_type="mixtral", num_local_experts=count, num_experts_per_tok=2, hidden_size=WIDTH
        )
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(count) for _ in range(2))

    def forward(self, x):
        for layer in self.model.layers:
            x = layer(x)
        return x.square().mean()


def train_with_auto_ep(deepcompile, stage):
    torch._dynamo.reset()
    forget_autocast()
    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"},
        "compile": {"deepcompile": deepcompile},
    }
    engine = deepspeed.initialize(model=ForAutoEP().to(device()), config=settings)[0]
    if deepcompile:
        engine.compile(backend="eager")
    trained = train(engine.module, engine, Case(), 0, 3)
    from_graphs = gradient_counters(engine)["from_graphs"] if deepcompile else 0
    engine.destroy()
    return trained, from_graphs


@pytest.mark.options("expert_parallel")
@vary("stage", [2], slow=[1])
@on_ranks(2, stop=True)
def test_auto_ep_trains_as_without_deepcompile(stage):
    """Experts would be averaged with those of the other rank."""
    off, _ = train_with_auto_ep(False, stage)
    on, from_graphs = train_with_auto_ep(True, stage)
    values, losses, norms = apart(on, off)
    assert values < 1e-5 and losses < 1e-5 and norms < 1e-4
    assert from_graphs > 0


@pytest.mark.follows("which have process groups of their own; use AdamW")
@on_ranks(1, stop=True)
def test_muon_is_refused():
    """Muon would look for matrices in the partitions of all ranks."""
    module = Mixture(2, 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
        "compile": {"deepcompile": True},
    }
    parameters = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(module.parameters()), "name": "all"}
    )
    assert outcome(deepspeed.initialize, model=module, model_parameters=parameters, config=config) == (
        "ValueError: DeepCompile with ZeRO stage 1: Muon is not supported with experts, which have process groups of "
        "their own; use AdamW"
    )


@pytest.mark.follows("is not supported where each expert lies on one rank; leave it out")
@on_ranks(2, stop=True)
def test_experts_of_one_rank_on_the_host_are_refused():
    """Their gradients would fill buckets at other places on other ranks."""
    said = outcome(make, Case(adam=True, offloaded=True), 2)
    assert "offload_optimizer is not supported where each expert lies on one rank" in said
