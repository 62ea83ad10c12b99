# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The norm of all gradients: over all parameter groups, in one collective."""

import math

import pytest
import torch
import torch.distributed as dist

from support.ids import vary
from support.on_ranks import on_ranks
from support.training import Case, average_gradients, batch, build, make_engine, make_optimizer

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


class TwoParts:
    """An ``mpu`` of two ranks, each of which trains a part of a model. None of the parameters says so."""

    def __init__(self):
        self._data, self._model = [dist.new_group([rank]) for rank in range(2)], dist.new_group([0, 1])

    def get_data_parallel_group(self):
        return self._data[dist.get_rank()]

    def get_model_parallel_group(self):
        return self._model

    get_model_parallel_rank = staticmethod(dist.get_rank)
    get_data_parallel_rank = staticmethod(lambda: 0)
    get_data_parallel_world_size = staticmethod(lambda: 1)
    get_model_parallel_world_size = staticmethod(lambda: 2)


@on_ranks(2)
def test_an_overflow_that_the_norm_leaves_out():
    """The rank would write NaN into its weights, because the first rank counts parameters that lie on several."""
    case = Case(clipping=1.0)
    module = build(case)
    engine = make_engine(module, case, optimizer=make_optimizer(module, case), mpu=TwoParts())
    engine.backward(engine(batch(0, 0, 0, 4)))
    if dist.get_rank():
        engine.optimizer.averaged_gradients[0][0].view(-1)[0] = math.inf
    engine.step()
    assert engine.optimizer.overflow
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    engine.destroy()
