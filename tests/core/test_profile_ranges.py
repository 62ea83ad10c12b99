# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A profile shows the stages of a gradient's life by name."""

import collections

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

from support.lifetime import backward, start
from support.on_ranks import on_ranks
from support.reducers import register
from support.training import Case, device


@pytest.mark.quick
@on_ranks(2)
def test_a_profile_names_the_stages():
    """A stage would have no range in a profile, or one for each parameter where there is one bucket."""
    reducer = reducer_module().Reducer(
        # Unlike any engine's number in this process.
        identity=2**40,
        bucket_numel=10**6,
        send_numel=10**6,
        overlap=True,
        synchronize_before=False,
        synchronize_after=False,
    )
    parameters = [torch.nn.Parameter(torch.ones(12, device=device())) for _ in range(3)]
    register(reducer, dist.group.WORLD, parameters)
    registrations = torch.tensor([reducer.identity, 0, 1, 2])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        reducer.begin_backward(True)
        for position, parameter in enumerate(parameters, start=1):
            torch.ops.deepcompile.reduce_grad(torch.ones_like(parameter), registrations, position)
        reducer.finish_backward(True, False)
    reducer.close()
    names = [event.name for event in profile.events() if event.name.startswith("deepcompile::")]
    assert collections.Counter(names) == {
        # The operator has a range of its own, which torch records.
        "deepcompile::reduce_grad": 3,
        "deepcompile::reduce": 3,
        "deepcompile::launch": 1,
        # Each partition has a part of each parameter.
        "deepcompile::bind": 3,
        "deepcompile::finish_backward": 1,
        # Marks of what memory is for. The first order begins with the last parameter, so two gradients wait. All
        # targets are copies out of one shard. What gradients were packed in is dropped, and later the message.
        "deepcompile::waiting": 2,
        "deepcompile::bound": 3,
        "deepcompile::dropped": 2,
    }


@pytest.mark.slow
@on_ranks(1)
def test_generated_code_gives_its_gradients_away():
    """Generated code would keep its gradients, so that each is copied when it is bound."""
    # Biases and norms get sums over rows, which Inductor gives another shape.
    _, engine = start(Case("BlocksWithin", backend="inductor", dtype="bf16"))
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            backward(engine)
        engine.step()
    engine.destroy()
    bound = [event for event in profile.events() if event.name == "deepcompile::bind"]
    assert len(bound) > 10
    assert not any(child.name == "aten::to" for event in bound for child in event.cpu_children)
