# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A step in which something goes wrong on every rank: the next one is right, or says what happened."""

import contextlib
import itertools
from typing import Dict, NamedTuple, Optional

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


class AfterLoss(NamedTuple):
    """What came of a step of which a part was lost."""

    raised: Optional[str]
    error: float  # of the steps behind it


def part_of_a_step_lost(case, how):
    """The second of three micro-batches raises where the caller says what belongs to a step.

    Where DeepSpeed counts micro-batches ("counted"), engine.step() is called behind the one that raised as behind the
    others.
    """
    pair = fragile(case)
    engine, plain = pair.engine, pair.plain
    pair.step(0)

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

    raised = None
    if how == "no_sync":
        engine.set_gradient_accumulation_boundary(True)
    try:
        run(1, fails=True)
    except RuntimeError as error:
        raised = str(error)
    if how == "counted":
        # The one that raised and those before it do not count, so the step still lacks two.
        for micro_step in range(2):
            engine.backward(engine(batch(1, micro_step, dist.get_rank(), 4)))
            engine.step()
        for micro_step in (2, 0, 1):
            (plain(batch(1, micro_step, dist.get_rank(), 4)) / 3).backward()
        pair.step_plain()
    else:
        if how == "no_sync":
            engine.set_gradient_accumulation_boundary(True)
        run(2, fails=False)
        pair.train_plain(2)
    return AfterLoss(raised, pair.last_error())


@pytest.mark.follows("call engine.optimizer.zero_grad() and run all of its micro-batches again")
@vary("how", ["boundary", "no_sync", "no_sync, counted", "coalesce_grad_reduction", "counted"])
@vary("stage", [1, 2])
def test_a_step_of_which_a_part_was_lost(ranks, how, stage):
    """A step would be taken with the gradients of fewer micro-batches than the caller has said belong to it."""
    if "no_sync" in how and stage == 2:
        pytest.skip("DeepSpeed refuses it")
    for after in ranks(2).run(part_of_a_step_lost, Case(stage=stage, accumulation=3, bucket=50), how):
        assert (after.raised is None) == (how == "counted")
        assert after.raised is None or "were dropped when a later one raised" in after.raised
        assert after.error < BOUND


def a_region_that_was_left(case, where):
    """The second of three micro-batches raises out of ``coalesce_grad_reduction()``, and all are run again.

    Another step follows.
    """
    pair = fragile(case)
    engine = pair.engine

    def region(step, fails):
        with engine.coalesce_grad_reduction():
            for micro_step in range(3):
                if fails and micro_step == 1:
                    arm(where, "interrupted" if where == "behind the backward" else "raises")
                engine.backward(engine(batch(step, micro_step, dist.get_rank(), 4)))

    raised = None
    for step in range(2):
        if step == 0:
            try:
                region(step, fails=True)
            except (Injected, KeyboardInterrupt) as error:
                raised = type(error).__name__
        region(step, fails=False)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        pair.train_plain(step)
    return AfterLoss(raised, pair.last_error())


@vary("where", ["forward", "backward", "behind the backward"])
@vary("stage", [1, 2])
def test_a_region_that_was_left(ranks, stage, where):
    """Gradients of a region that an exception has left would be added to those of the region that is run again."""
    case = Case(stage=stage, accumulation=3, bucket=50)
    for after in ranks(2).run(a_region_that_was_left, case, where):
        assert after.raised == ("KeyboardInterrupt" if where == "behind the backward" else "Injected")
        assert after.error < BOUND


class AfterStep(NamedTuple):
    """What came of a step that changed nothing."""

    raised: Optional[str]
    held: Dict[str, int]  # behind it
    error: float  # when it was redone


def a_step_that_changed_nothing(case, where=(optimizer_step, "global_norm")):
    """A step raises before it changes parameters, and is redone. ``where``: (holder, name) of what raises."""
    pair = fragile(case)
    holder, name = where
    own = getattr(holder, name)

    def raises(*_):
        setattr(holder, name, own)
        raise Injected(f"no {name}")

    setattr(holder, name, raises)
    raised = None
    try:
        train_step(pair.engine, 0, case.accumulation)
    except Injected as error:
        raised = str(error)
    after = held(gradient_counters(pair.engine))
    for step in range(2):
        pair.step(step)
    return AfterStep(raised, after, pair.last_error())


def interrupted_as_it_is_handed_over(case):
    return a_step_that_changed_nothing(case, (BackwardLife, "_hand_over"))


@vary("stage", [1, 2])
@pytest.mark.parametrize("function", [a_step_that_changed_nothing, interrupted_as_it_is_handed_over])
def test_a_step_that_changed_nothing(ranks, stage, function):
    """A step that raised before it changed parameters would keep its gradients, or refuse to be redone."""
    for after in ranks(2).run(function, Case(stage=stage, accumulation=3)):
        assert after.raised in ("no global_norm", "no _hand_over")
        assert after.held == NOTHING
        assert after.error < BOUND


@vary("where, how", [("forward", "raises"), ("backward", "raises"), ("behind the backward", "interrupted")])
def test_timers_go_on(ranks, where, how):
    """A timer that an exception left running would make the next step raise that it is running already."""
    case = Case(accumulation=3, bucket=50, config={"wall_clock_breakdown": True})
    for after in ranks(2).run(on_every_rank, case, where, how):
        assert after.raised and after.error < BOUND


def test_timers_of_a_step_go_on(ranks):
    """The timers of a step that raised before the optimizer's would be left running."""
    case = Case(accumulation=3, bucket=50, config={"wall_clock_breakdown": True})
    for after in ranks(2).run(a_step_that_changed_nothing, case):
        assert after.error < BOUND
