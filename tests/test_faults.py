# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a step: the next one is right, or every rank ends with an error that says what happened."""

import itertools
import re

import pytest
import torch

from support import faults
from support.pool import Ranks
from support.training import Case, device

BOUND = 1e-5
NOTHING = {"bound": 0, "pending": 0, "bucket": 0, "unreduced": 0}
# Seconds after which a collective gives up, and what the test allows on top of them. NCCL's watchdog takes another
# minute to write down what was running before it ends the process.
TIMEOUT, GRACE = 6, 20
PATIENCE = 150 if torch.cuda.is_available() else 80


@pytest.mark.parametrize("stage, accumulation", [(1, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize(
    "where, how",
    [
        *itertools.product(("forward", "backward"), faults.HAPPENINGS),
        ("at the end of the graph", "interrupted"),
        ("behind the backward", "interrupted"),
    ],
)
def test_the_next_step_is_right(ranks, where, how, stage, accumulation):
    case = Case(stage=stage, accumulation=accumulation, bucket=50)
    expected = {"raises": "Injected", "interrupted": "KeyboardInterrupt"}.get(how)
    # Python's handler runs in the main thread, and a GPU's backward in the device's: then it is behind it, too.
    on_gpu = (where, how, device().type) == ("backward", "interrupted", "cuda")
    behind = where in ("at the end of the graph", "behind the backward") or on_gpu
    for raised, after, at_last, error in ranks(2).run(faults.on_every_rank, case, where, how):
        assert raised == expected or (expected is None and raised in ("RuntimeError", "OutOfMemoryError"))
        # What was reduced by then is dropped when the next backward or step begins.
        assert (after["bound"] > 0 and {**after, "bound": 0} == NOTHING) if behind else after == NOTHING
        assert at_last == NOTHING
        assert error < BOUND


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("alike", [True, False], ids=["the same size", "another size"])
@pytest.mark.parametrize("chosen", [[(0,), (1,)], [(0, 1), (1, 0)]], ids=["other blocks", "another order"])
def test_another_branch(ranks, chosen, alike, stage):
    if torch.cuda.is_available() and not alike:
        pytest.skip("NCCL waits for ever where sizes differ, and then ends the process: torch's watchdog")
    for before, apart, together in ranks(2).run(faults.another_branch, Case(stage=stage), alike, chosen):
        assert before == (None, True)
        # Its gradients were added to those of other parameters. Nothing may use them, nor what comes after.
        for raised, moved in (apart, together):
            assert "ranks have reduced different gradients" in raised
            assert not moved


def in_processes_of_their_own(function, *args, patience=PATIENCE):
    """What each of two ranks returned, or how it ended, under a short timeout of the process group."""
    return Ranks(2, {"RANKS_TIMEOUT": str(TIMEOUT)}).run_to_the_end(function, *args, timeout=patience)


def names_the_bucket(message):
    return re.search("could not reduce the bucket that begins with the gradient of parameter '.+' of shape", message)


def test_memory_that_runs_out_anywhere_in_a_backward(capfd):
    numel = faults.Large.NUMEL
    amounts = [8 * numel * index for index in range(6)]
    case = Case(bucket=numel)
    answers = in_processes_of_their_own(faults.memory_that_runs_out, case, amounts, patience=150)
    if any(was_ended_by_nccl(answer, capfd) for answer in answers):
        return
    for raised, afterwards, error, moved, ended in answers:
        assert any("memory" in message for message in raised if message)
        # A backward that ran out of memory was followed by a step at least once.
        assert len(raised) > 1
        assert all(after == NOTHING for message, after in zip(raised, afterwards) if message)
        assert error < BOUND < moved
        assert ended is None or "reduced different gradients" in ended or names_the_bucket(ended)


def was_ended_by_nccl(answer, capfd):
    """Whether NCCL's watchdog has said what timed out and ended the process: no exception can come from there."""
    return (
        torch.cuda.is_available()
        and answer == "died with exit status -6"
        and "Watchdog caught collective operation timeout" in capfd.readouterr().err
    )


def test_a_rank_that_dies(capfd):
    first, second = in_processes_of_their_own(faults.on_one_rank, Case(bucket=50), "dies", 1, 1)
    assert second == "died with exit status 17"
    if was_ended_by_nccl(first, capfd):
        return
    raised, seconds = first
    assert names_the_bucket(raised[0]) and seconds < TIMEOUT + GRACE


def test_a_rank_that_hangs(capfd):
    first, second = in_processes_of_their_own(faults.on_one_rank, Case(bucket=50), "hangs", 1, 1)
    if was_ended_by_nccl(first, capfd):
        return
    raised, seconds = first
    assert names_the_bucket(raised[0]) and "Timed out" in raised[0]
    assert TIMEOUT - 1 < seconds < TIMEOUT + GRACE
    # It comes too late.
    raised, seconds = second
    assert names_the_bucket(raised[0]) and seconds < 2 * TIMEOUT + GRACE


@pytest.mark.parametrize("stage, accumulation", [(1, 3), (2, 2)])
def test_a_backward_that_raises_on_one_rank(stage, accumulation, capfd):
    case = Case(stage=stage, accumulation=accumulation, bucket=50)
    answers = in_processes_of_their_own(faults.on_one_rank, case, "raises", 1)
    if any(was_ended_by_nccl(answer, capfd) for answer in answers):
        return
    for rank, (raised, _) in enumerate(answers):
        # It never gets another step, whatever it tries.
        assert all(raised)
        assert rank == 0 or raised[0].startswith("Injected")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("how", ["boundary", "no_sync", "no_sync, counted", "coalesce_grad_reduction", "counted"])
def test_a_step_of_which_a_part_was_lost(ranks, how, stage):
    if "no_sync" in how and stage == 2:
        pytest.skip("DeepSpeed refuses it")
    for raised, error in ranks(2).run(faults.part_of_a_step_lost, Case(stage=stage, accumulation=3, bucket=50), how):
        assert (raised is None) == (how == "counted")
        assert raised is None or "were dropped when a later one raised" in raised
        assert error < BOUND


@pytest.mark.skipif(torch.cuda.is_available(), reason="with NCCL a step returns before its parameters have arrived")
def test_a_rank_that_dies_in_the_optimizer():
    first, second = in_processes_of_their_own(faults.dies_in_the_optimizer, Case(), 1)
    assert second == "died with exit status 17"
    assert "could not get the parameters that other ranks have stepped" in first["step"]
    for then in ("forward", "save"):
        assert "was ended half way" in first[then] and "load a checkpoint" in first[then]
    assert first["destroy"] is None
    assert all(took < TIMEOUT + GRACE for name, took in first.items() if name.endswith("took"))


@pytest.mark.parametrize("where", ["forward", "backward", "behind the backward"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_block_that_was_left(ranks, stage, where):
    case = Case(stage=stage, accumulation=3, bucket=50)
    for raised, error in ranks(2).run(faults.a_block_that_was_left, case, where):
        assert raised == ("KeyboardInterrupt" if where == "behind the backward" else "Injected")
        assert error < BOUND


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_that_changed_nothing(ranks, stage):
    for raised, after, error in ranks(2).run(faults.a_step_that_changed_nothing, Case(stage=stage, accumulation=3)):
        assert raised == "no norm"
        assert after == NOTHING
        assert error < BOUND


def test_timers_go_on(ranks):
    case = Case(accumulation=3, bucket=50, config={"wall_clock_breakdown": True})
    for where, how in [("forward", "raises"), ("backward", "raises"), ("behind the backward", "interrupted")]:
        for raised, _, _, error in ranks(2).run(faults.on_every_rank, case, where, how):
            assert raised and error < BOUND
    for _, _, error in ranks(2).run(faults.a_step_that_changed_nothing, case):
        assert error < BOUND


@pytest.mark.parametrize("stage", [1, 2])
def test_half_a_step(ranks, tmp_path, stage):
    case = Case(stage=stage, accumulation=3, groups=2)
    for (first, second), error in ranks(2).run(faults.half_a_step, case, str(tmp_path)):
        assert first == "behind the update"
        assert "was ended half way (Injected: behind the update)" in second
        assert error < BOUND
