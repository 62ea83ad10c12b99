# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 under DeepCompile is the base's, and shares this fork's ``fx.py``."""

import copy
import dataclasses
from typing import List, NamedTuple

import pytest
import torch
import torch.distributed as dist

import deepspeed

from support.ids import vary
from support.training import BOUND, Case, batch, build, make_engine, make_optimizer, relative_error, step_plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: DeepCompile ZeRO-3 needs CUDA"),
]
BUCKET = 4 * 2**20  # elements


class Zero3(NamedTuple):
    error: float  # of the parameters
    after_steps: List[int]  # by how many bytes memory had grown since before the first forward


def train_zero3(case):
    """Trains with ZeRO-3 under DeepCompile beside a plain loop."""
    module = build(case)
    plain = copy.deepcopy(module)
    engine = make_engine(module, dataclasses.replace(case, deepcompile=True))
    optimizer = make_optimizer(plain, case)
    # Libraries keep a workspace of 32 MiB or more from their first call on.
    plain(batch(0, 0, dist.get_rank(), 4)).backward()
    plain.zero_grad()
    before, after_steps = torch.cuda.memory_allocated(), []
    for step in range(case.steps):
        loss = engine(batch(step, 0, dist.get_rank(), 4))
        engine.backward(loss)
        engine.step()
        del loss
        after_steps.append(torch.cuda.memory_allocated() - before)
        plain(batch(step, 0, dist.get_rank(), 4)).backward()
        step_plain(plain, optimizer)
    errors = []
    for trained, expected in zip(module.parameters(), plain.parameters()):
        with deepspeed.zero.GatheredParameters([trained]):
            errors.append(relative_error([trained], [expected]))
    engine.destroy()
    return Zero3(max(errors), after_steps)


@vary("backend", ["eager", "inductor"])
@vary("model", ["OneGraph", "SeveralGraphs", "NoParametersFirstButGrad"])
def test_zero3_trains_and_gives_its_buckets_back(ranks, model, backend):
    """The base's ZeRO-3 would train otherwise, or keep its buckets, for a change of this fork in ``fx.py``."""
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    case = Case(model=model, stage=3, backend=backend, bucket=BUCKET, config=config)
    for result in ranks(2).run(train_zero3, case):
        assert result.error < BOUND
        # One bucket that stayed would be 16 MiB; the model's own states are some kilobytes.
        assert max(result.after_steps) < BUCKET, result.after_steps
