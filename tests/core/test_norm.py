# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The norm of all gradients: over all parameter groups, in one collective."""

import math

import pytest
import torch
import torch.distributed as dist

from support.ids import vary
from support.on_ranks import on_ranks
from support.training import Case, average_gradients, batch, build, make_engine

GROUPS = 7


@vary("groups", [1, GROUPS])
@on_ranks(2)
def test_the_norm_takes_one_collective(groups):
    """Each parameter group would take an all-reduce of its own, or lose what another rank or group has found."""
    case = Case(groups=groups, clipping=1.0)
    module, plain = build(case), build(case)
    engine, stepped, ids = make_engine(module, case), [], batch(0, 0, dist.get_rank(), 4)
    plain(ids).backward()
    average_gradients(plain)
    # The second time with a NaN on the last rank, in the last group of which it has elements.
    for last in (False, True):
        engine.backward(engine(ids))
        if last and dist.get_rank() == dist.get_world_size() - 1:
            of_groups = [views[0].view(-1) for views in engine.optimizer.averaged_gradients.values()]
            number = max(number for number, elements in enumerate(of_groups) if elements.numel())
            # Found by a rank that has it in one of several groups.
            assert number > 0 or groups == 1
            of_groups[number][0] = math.nan
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.step()
        all_reduces = sum(event.name == "c10d::allreduce_" for event in profile.events())
        stepped.append((all_reduces, float(engine.get_global_grad_norm()), engine.optimizer.overflow))
    engine.destroy()
    norms = [parameter.grad.norm() for parameter in plain.parameters()]
    expected = pytest.approx(float(torch.linalg.vector_norm(torch.stack(norms))), rel=1e-5)
    assert stepped == [(1, expected, False), (1, math.inf, True)]
