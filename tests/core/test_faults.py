# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A step in which something goes wrong on every rank: the next one is right, or says what happened."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.compile.zero_1_and_2.gradient.backward import BackwardLife
from deepspeed.compile.zero_1_and_2.step import step as optimizer_step

from support.faults import (
    HAPPENINGS,
    Injected,
    arm,
    fragile,
    in_backward,
    on_every_rank,
    raise_injected,
    train_step,
)
from support.ids import vary
from support.on_ranks import on_ranks
from support.training import BOUND, NOTHING, Case, batch, device, held


@pytest.mark.sanitized
@pytest.mark.table
@vary(
    "where, how, direct",
    [
        *itertools.product(("forward", "backward"), HAPPENINGS, (False,)),
        ("backward", "raises", True),
        ("at the end of the graph", "interrupted", False),
        ("behind the backward", "interrupted", False),
    ],
)
@vary("stage, accumulation", [(1, 1), (1, 3), (2, 3)])
def test_the_next_step_is_right(ranks, where, how, direct, stage, accumulation):
    """What a backward has reduced before it ended early would be added to the next step, or never be released."""
    case = Case(stage=stage, accumulation=accumulation, bucket=50)
    expected = {"raises": "Injected", "interrupted": "KeyboardInterrupt"}.get(how)
    # Python's handler runs in the main thread, and a GPU's backward in the device's: then it is behind it, too.
    on_gpu = (where, how, device().type) == ("backward", "interrupted", "cuda")
    behind = where in ("at the end of the graph", "behind the backward") or on_gpu
    for after in ranks(2).run(on_every_rank, case, where, how, direct):
        assert after.raised == expected or (expected is None and after.raised in ("RuntimeError", "OutOfMemoryError"))
        assert (after.received > 0) == (where != "forward")
        # What was reduced by then is dropped when the next backward or step begins.
        if behind:
            assert after.held["bound"] > 0 and {**after.held, "bound": 0} == NOTHING
        else:
            assert after.held == NOTHING
        assert after.held_at_last == NOTHING
        assert after.error < BOUND


@pytest.mark.follows("call engine.optimizer.zero_grad() and run all of its micro-batches again")
@vary("how", ["boundary", "no_sync", "no_sync, counted", "coalesce_grad_reduction", "counted"])
@vary("stage", [1, 2])
@on_ranks(2)
def test_a_step_of_which_a_part_was_lost(how, stage):
    """A step would be taken with the gradients of fewer micro-batches than the caller has said belong to it."""
    if "no_sync" in how and stage == 2:
        pytest.skip("DeepSpeed refuses it")
    pair = fragile(Case(stage=stage, accumulation=3, bucket=50))
    engine, plain = pair.engine, pair.plain
    pair.step(0)

    # Where DeepSpeed counts micro-batches, engine.step() is called behind the one that raises as behind the others.
    steps_each = how in ("boundary", "counted", "no_sync, counted")

    def micro_batch(step, micro_step, fails):
        last = micro_step == 2
        if how == "boundary":
            engine.set_gradient_accumulation_boundary(last)
        if fails and micro_step == 1:
            in_backward.happen = raise_injected
        loss = engine(batch(step, micro_step, dist.get_rank(), 4))
        with engine.no_sync() if "no_sync" in how and not last else contextlib.nullcontext():
            with contextlib.suppress(Injected):
                engine.backward(loss)
        if steps_each:
            engine.step()

    def run(step, fails):
        in_a_region = how == "coalesce_grad_reduction"
        with engine.coalesce_grad_reduction() if in_a_region else contextlib.nullcontext():
            for micro_step in range(3):
                micro_batch(step, micro_step, fails)
        if not steps_each:
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
            engine.set_gradient_accumulation_boundary(False)

    if how == "no_sync":
        engine.set_gradient_accumulation_boundary(True)
    if how == "counted":
        run(1, fails=True)
        # The one that raised and those before it do not count, so the step still lacks two.
        for micro_step in range(2):
            engine.backward(engine(batch(1, micro_step, dist.get_rank(), 4)))
            engine.step()
        for micro_step in (2, 0, 1):
            (plain(batch(1, micro_step, dist.get_rank(), 4)) / 3).backward()
        pair.step_plain()
    else:
        with pytest.raises(RuntimeError, match="were dropped when a later one raised"):
            run(1, fails=True)
        if how == "no_sync":
            engine.set_gradient_accumulation_boundary(True)
        run(2, fails=False)
        pair.train_plain(2)
    assert pair.last_error() < BOUND


@vary("where", ["forward", "backward", "behind the backward"])
@vary("stage", [1, 2])
@on_ranks(2)
def test_a_region_that_was_left(stage, where):
    """Gradients of a region that an exception has left would be added to those of the region that is run again."""
    pair = fragile(Case(stage=stage, accumulation=3, bucket=50))
    engine = pair.engine

    def region(step, fails):
        with engine.coalesce_grad_reduction():
            for micro_step in range(3):
                if fails and micro_step == 1:
                    arm(where, "interrupted" if where == "behind the backward" else "raises")
                engine.backward(engine(batch(step, micro_step, dist.get_rank(), 4)))

    for step in range(2):
        if step == 0:
            with pytest.raises(KeyboardInterrupt if where == "behind the backward" else Injected):
                region(step, fails=True)
        region(step, fails=False)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        pair.train_plain(step)
    assert pair.last_error() < BOUND


def redo_a_step(case, holder, name):
    """A step raises before it changes parameters, in a function of ``holder``, and is redone."""
    pair = fragile(case)
    with mock.patch.object(holder, name, side_effect=Injected), pytest.raises(Injected):
        train_step(pair.engine, 0, case.accumulation)
    assert held(gradient_counters(pair.engine)) == NOTHING
    for step in range(2):
        pair.step(step)
    assert pair.last_error() < BOUND


HOLDERS = {"global_norm": optimizer_step, "_hand_over": BackwardLife}


@vary("stage", [1, 2])
@vary("name", HOLDERS)
@on_ranks(2)
def test_a_step_that_changed_nothing(stage, name):
    """A step that raised before it changed parameters would keep its gradients, or refuse to be redone."""
    redo_a_step(Case(stage=stage, accumulation=3), HOLDERS[name], name)


@vary("where, how", [("forward", "raises"), ("backward", "raises"), ("behind the backward", "interrupted")])
def test_timers_go_on(ranks, where, how):
    """A timer that an exception left running would make the next step raise that it is running already."""
    case = Case(accumulation=3, bucket=50, config={"wall_clock_breakdown": True})
    for after in ranks(2).run(on_every_rank, case, where, how):
        assert after.raised and after.error < BOUND


@on_ranks(2)
def test_timers_of_a_step_go_on():
    """The timers of a step that raised before the optimizer's would be left running."""
    case = Case(accumulation=3, bucket=50, config={"wall_clock_breakdown": True})
    redo_a_step(case, optimizer_step, "global_norm")
