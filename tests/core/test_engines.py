# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Several engines, steps in other threads, process groups that torch wraps, and a long run."""

import functools
import gc
import random

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.engines import OVERLAPPED, CaseBeside, check
from support.ids import sanitized, vary
from support.lifetime import allocated_bytes
from support.on_ranks import on_ranks
from support.threads import in_threads
from support.training import (
    BOUND,
    Case,
    batch,
    device,
    held,
    relative_error,
)

# Two parameters, quickly compiled: for an engine that is there for another one's sake.
SMALL = "FillsPartition"


@pytest.mark.parametrize(
    "cases",
    [
        sanitized([Case(stage=1, model=SMALL, accumulation=2), Case(stage=2, model="RepeatedLayers")]),
        [Case(stage=2, model=SMALL, dtype="bf16"), Case(stage=1, model="RepeatedLayers", accumulation=3)],
        [Case(stage=1, model=SMALL), Case(stage=1, deepcompile=False)],
        pytest.param(
            [Case(stage=1, dtype="bf16", backend="inductor"), Case(stage=2, backend="inductor")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [Case(stage=1, model="BlocksWithin", config=OVERLAPPED), Case(stage=2, model="BlocksWithin")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["stages", "dtypes", "one-without-DeepCompile", "inductor", "blocks"],
)
@on_ranks(2)
def test_two_engines_taking_turns(cases):
    """What an engine keeps for the whole process would be the other engine's when the first goes on with its step."""
    pairs = [CaseBeside(case, seed) for seed, case in enumerate(cases)]
    for step in range(3):
        for micro_step in range(max(case.accumulation for case in cases)):
            for pair in pairs:
                if micro_step < pair.case.accumulation:
                    pair.micro_batch(batch(step, micro_step, dist.get_rank(), 4))
                if micro_step == pair.case.accumulation - 1:
                    pair.step_plain()
    check([[pair.end() for pair in pairs]], cases)


def in_another_order(case, in_one_backward):
    """Each rank steps two engines of one kind, every other rank in the other order.

    Returns what was raised, and for each engine whether its parameters changed.

    ``in_one_backward``: whether one backward goes through both, which the rank has run in its order.
    """
    pairs, raised = [CaseBeside(case) for _ in range(2)], []
    ids = batch(0, 0, dist.get_rank(), 4)
    engines = [pair.engine for pair in (reversed(pairs) if dist.get_rank() % 2 else pairs)]

    def train(engine):
        engine.backward(engine(ids))
        engine.step()

    attempts = [functools.partial(train, engine) for engine in engines]
    if in_one_backward:
        attempts = [sum(engine(ids) for engine in engines).backward, *(pair.engine.step for pair in pairs)]
    for attempt in attempts:
        try:
            attempt()
        except RuntimeError as error:
            raised.append(str(error))
    moved = [relative_error(pair.module.parameters(), pair.before.parameters()) > 0 for pair in pairs]
    for pair in pairs:
        pair.engine.destroy()
    return raised, moved


def test_turns_in_another_order(ranks):
    """Ranks would average the gradients of one engine with those of another, and train on."""
    for raised, moved in ranks(2).run(in_another_order, Case(model=SMALL, bucket=50), in_one_backward=False):
        assert len(raised) == 2
        assert all("ranks sent different gradients" in message for message in raised)
        assert not any(moved)


@vary("stage", [1, 2])
def test_one_backward_in_another_order(ranks, stage):
    """The fingerprints of two engines would be alike: each message meets one of the same size of the other engine."""
    for raised, moved in ranks(2).run(
        in_another_order, Case(model=SMALL, stage=stage, bucket=50), in_one_backward=True
    ):
        assert any("ranks sent different gradients" in message for message in raised), raised
        assert not any(moved)


@on_ranks(2)
def test_one_loss_of_two_engines():
    """The first engine whose gradients are complete would end the backward of the other one."""
    cases = [Case(stage=1, model=SMALL), Case(stage=2, model="SeveralGraphs")]
    pairs = [CaseBeside(case, seed) for seed, case in enumerate(cases)]
    for step in range(3):
        ids = batch(step, 0, dist.get_rank(), 4)
        # As where a critic's loss goes into an actor's.
        first, second = (pair.engine(ids) for pair in pairs)
        (first * 2 + first.detach() * second).backward()
        first, second = (pair.plain(ids) for pair in pairs)
        (first * 2 + first.detach() * second).backward()
        for pair in pairs:
            pair.engine.step()
            pair.step_plain()
    check([[pair.end() for pair in pairs]], cases)


@on_ranks(2)
def test_steps_in_other_threads():
    """What an engine keeps of a backward would be local to the thread that began the step."""
    cases = [Case(stage=1, model=SMALL, accumulation=2), Case(stage=2, model="EagerBlocks")]
    pairs = [CaseBeside(case, seed) for seed, case in enumerate(cases)]
    own_device = device()

    def run(pair, step):
        if own_device.type == "cuda":
            # Each thread has a current device of its own.
            torch.cuda.set_device(own_device)
        pair.step(step)

    for step in range(3):
        for pair in pairs:
            in_threads([functools.partial(run, pair, step)])
    check([[pair.end() for pair in pairs]], cases)


# Debugging aids of torch ---------------------------------------------------------------------------------------------


# Processes with a variable of their own take long to start.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case(model=SMALL, accumulation=2, bucket=50), Case(stage=2, model="BlocksWithin", config=OVERLAPPED)],
    ids=["whole", "blocks"],
)
# Torch's wrapper compares what ranks are about to send. DeepSpeed makes groups with a longer timeout than this.
@on_ranks(2, patience=60, TORCH_DISTRIBUTED_DEBUG="DETAIL")
def test_process_groups_that_torch_wraps(case):
    """The reducer would ask torch's wrapper for what only gloo's or NCCL's own group has, and raise."""
    pair = CaseBeside(case)
    wrapped = pair.engine.data_parallel_group._get_backend(device()).wrapped_pg
    for step in range(3):
        pair.step(step)
    assert pair.end().worst < BOUND
    # Else what the engine's group wraps waits longer for another rank.
    assert wrapped.options._timeout.total_seconds() == 60


# A long run --------------------------------------------------------------------------------------------------------


def long_run(case, steps, settled):
    """1 to 4 micro-batches a step, of 3 to 20 tokens, beside a plain loop; a sample every ``settled`` steps.

    The model is evaluated after every third step.
    """
    pair, rank = CaseBeside(case), dist.get_rank()
    # The same on every rank, and lengths of each rank's own.
    of_all, own = random.Random(1), random.Random(2 + rank)
    most_held, allocated, objects = 0, [], []
    for step in range(1, steps + 1):
        micro_batches = of_all.randint(1, 4)
        for micro_step in range(micro_batches):
            ids = batch(step, micro_step, rank, own.randint(3, 20))
            pair.engine.set_gradient_accumulation_boundary(micro_step == micro_batches - 1)
            pair.engine.backward(pair.engine(ids) / micro_batches)
            pair.engine.step()
            (pair.plain(ids) / micro_batches).backward()
        pair.step_plain()
        if step % 3 == 0:
            pair.evaluate(batch(step, 0, rank, own.randint(3, 20)))
        most_held = max(most_held, *held(gradient_counters(pair.engine)).values())
        if step % settled == 0:
            gc.collect()
            allocated.append(allocated_bytes(ids.is_cuda))
            objects.append(len(gc.get_objects()))
    assert pair.end().worst < BOUND
    assert most_held == 0
    # A tensor of the smallest parameter, kept in each step, would be many times that.
    assert max(allocated[1:]) - allocated[0] < 2**12
    # Nor an object for every evaluation.
    assert max(objects[1:]) - objects[0] < 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(), Case(model="BlocksWithin", stage=2, adam=True, config=OVERLAPPED)], ids=["whole", "blocks"]
)
def test_a_long_run(ranks, request, case):
    steps = request.config.getoption("--steps")
    # What a thread caches of the C heap counts as in use there, and the caches fill for hundreds of steps.
    pool = ranks(2, GLIBC_TUNABLES="glibc.malloc.tcache_count=0")
    # Beside many other processes a step takes a second and more.
    pool.run(long_run, case, steps, 50, timeout=4 * steps)
