# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How long a rank waits for another one. What it says when that time is over is in ``test_faults_on_one_rank.py``."""

import datetime

import pytest
import torch.distributed as dist

from deepspeed.compile.fixes.base.timeouts import shorten_timeout

from support.on_ranks import on_ranks
from support.options import SMALL
from support.training import Case, build, device, make_engine


def backend_of(group):
    return group._get_backend(device())


def seconds(group):
    return backend_of(group).options._timeout.total_seconds()


def timeouts_of_an_engine(deepcompile):
    """Makes an engine where ``init_distributed()`` was given a minute. Returns how long the engine's group waits."""
    world, case = backend_of(dist.group.WORLD), Case(model=SMALL, deepcompile=deepcompile)
    before = world.options._timeout
    try:
        world.set_timeout(datetime.timedelta(seconds=60))
        engine = make_engine(build(case), case)
        found = seconds(engine.optimizer.dp_process_group)
        backend_of(engine.optimizer.dp_process_group).set_timeout(before)
        engine.destroy()
    finally:
        world.set_timeout(before)
    return found


@pytest.mark.quick
def test_an_engine_waits_no_longer_than_was_asked(ranks):
    """A rank would wait half an hour for one that has died, or an engine without DeepCompile be another."""
    assert ranks(1).run(timeouts_of_an_engine, True) == [60]
    assert ranks(1).run(timeouts_of_an_engine, False) != [60]


@pytest.mark.quick
@on_ranks(1)
def test_a_shorter_timeout_stays():
    """A caller who has made a group that gives up sooner would wait longer in it."""
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=limit)) for limit in (10, 10**6)]
    for group in groups:
        shorten_timeout(group, device())
    assert [seconds(group) for group in groups] == [10, seconds(dist.group.WORLD)]
