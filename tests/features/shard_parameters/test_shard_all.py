# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trained parameters that are sharded over ranks train to the same bits as whole ones."""

import contextlib
from typing import List, NamedTuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.shard_parameters import feature, unsharded_parameters
from deepspeed.compile.features.shard_parameters.at_rest import Resharded

from support.frozen import HIDING, MODELS, late
from support.ids import vary
from support.training import Case, batch, device, make_engine

SHARDED = {"compile": {"regional_compilation": True, "shard_parameters": "all"}}
WHOLE = {"compile": {"regional_compilation": True}}
SLOW = pytest.mark.slow


def make(model, config, trained, **case):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = {**MODELS, **HIDING}[model]().to(device())
    if trained == "all":
        module.requires_grad_(True)
    elif trained == "some":
        for index, parameter in enumerate(module.parameters()):
            parameter.requires_grad_(index % 3 > 0)
    return module, make_engine(module, Case(config=config, **{"adam": True, **case}))


class Trained(NamedTuple):
    losses: List[torch.Tensor]
    parameters: List[torch.Tensor]
    masters: List[torch.Tensor]
    at_rest: int


def train(model, config, trained="all", steps=3, skips=False, evaluates=False, direct=False, **case):
    module, engine = make(model, config, trained, **case)
    rank, losses = dist.get_rank(), []
    for step in range(steps):
        for micro_step in range(engine.gradient_accumulation_steps()):
            loss = engine(batch(step, micro_step, rank, 4), skips and (rank + step) % 2 == 0)
            loss.backward() if direct else engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        if evaluates:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(batch(step, 0, rank, 4)))
            engine.train()
    at_rest = sum(isinstance(each, Resharded) for each in module.parameters())
    masters = [each.detach().clone() for each in engine.optimizer.single_partition_of_fp32_groups]
    with unsharded_parameters(engine):
        parameters = [each.detach().clone() for each in module.parameters()]
        engine.destroy()
    return Trained(losses, parameters, masters, at_rest)


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def compare(model, delay=None, **more):
    with late(delay) if delay is not None else contextlib.nullcontext():
        sharded = train(model, SHARDED, **more)
    whole = train(model, WHOLE, **more)
    equal = [same(getattr(sharded, name), getattr(whole, name)) for name in ("losses", "parameters", "masters")]
    return equal, sharded.at_rest


@vary("model", [name for name in MODELS if name not in ("quantized", "casting")])
@vary("stage, accumulation, groups, dtype, trained", [
    (1, 2, 1, "fp32", "all"),
    (2, 1, 2, "bf16", "all"),
    (2, 2, 2, "fp32", "some"),
    (1, 1, 1, "bf16", "some"),
])
def test_it_trains_to_the_same_bits(ranks, model, stage, accumulation, groups, dtype, trained):
    case = {"stage": stage, "accumulation": accumulation, "groups": groups, "dtype": dtype, "trained": trained}
    for equal, at_rest in ranks(2).run(compare, model, evaluates=True, **case):
        assert equal == [True, True, True]
        assert at_rest >= 15
