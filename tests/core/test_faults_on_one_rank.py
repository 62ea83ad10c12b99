# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank: every rank ends with an error that says what happened."""

import contextlib
import copy
import os
import time
from typing import Dict, List, NamedTuple, Optional

import pytest
import torch
import torch.distributed as dist

from support.ends import GRACE, TIMEOUT, in_processes_of_their_own, names_the_bucket, not_ended_by_nccl
from support.faults import Injected, fragile, held_soon, in_backward, raise_injected, train_step
from support.ids import vary
from support.lifetime import address_space_left
from support.options import outcome
from support.training import (
    BOUND,
    NOTHING,
    Case,
    batch,
    build,
    device,
    make_engine,
    make_optimizer,
    relative_error,
    train_plain,
)

# Memory that runs out --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_left(numbytes):
    """Lets this process allocate about so much more: of its address space or, on a GPU, of the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + numbytes) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    with address_space_left(numbytes):
        yield


def case_of(**options):
    """A case without copy engines, where ranks wait at other places. In ``carry.py`` ranks of copy engines die."""
    return Case(config={"compile": {"copy_engines": False}}, **options)


class Large(torch.nn.Module):
    """Matrices of 36 MiB: beyond 32, the C library gives memory back to the system as soon as it is free."""

    NUMEL = 9 * 2**20

    def __init__(self):
        super().__init__()
        self.matrices = torch.nn.ParameterList(torch.full((64, self.NUMEL // 64), 5e-5) for _ in range(4))

    def forward(self, ids):
        x = ids[:, :1] + torch.ones(1, 64, device=ids.device)
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix @ matrix.t())
        return (x - 1).square().mean()


class OutOfMemory(NamedTuple):
    """What came of backwards with little memory left, each followed by a step with enough of it."""

    raised: List[Optional[str]]  # by each backward
    held: List[Dict[str, int]]  # behind each backward
    error: float  # of the steps
    moved: float  # how far these went
    # What ended the steps, if something did: ranks that ran out of memory in different places have sent different
    # gradients.
    ended: Optional[str]


def memory_that_runs_out(case, amounts):
    """Backwards with little memory left, more each time, and after each that raised a step with enough of it."""
    torch._dynamo.reset()
    module = Large().to(device())
    plain, before = copy.deepcopy(module), copy.deepcopy(module)
    engine, optimizer = make_engine(module, case), make_optimizer(plain, case)
    raised, afterwards, ended = [], [], None
    train_step(engine, 0, 1)
    train_plain(plain, optimizer, 0, 1)
    for step, amount in enumerate(amounts, 1):
        loss = engine(batch(99, 0, dist.get_rank(), 4))
        try:
            with memory_left(amount):
                engine.backward(loss)
            raised.append(None)
            engine.optimizer.zero_grad()
        except (RuntimeError, MemoryError) as error:
            raised.append(str(error))
        del loss
        afterwards.append(held_soon(engine))
        try:
            train_step(engine, step, 1)
        except RuntimeError as error:
            ended = str(error)
            break
        train_plain(plain, optimizer, step, 1)
    error = relative_error(module.parameters(), plain.parameters())
    moved = relative_error(module.parameters(), before.parameters())
    engine.destroy()
    return OutOfMemory(raised, afterwards, error, moved, ended)


# In make test, allocations fail between two graphs, in test_faults.py.
@pytest.mark.slow
def test_memory_that_runs_out_anywhere_in_a_backward(capfd):
    numel = Large.NUMEL
    amounts = [8 * numel * index for index in range(6)]
    case = case_of(bucket=numel)
    answers = in_processes_of_their_own(memory_that_runs_out, case, amounts)
    for answer in not_ended_by_nccl(answers, capfd).values():
        assert any("memory" in message for message in answer.raised if message)
        # A backward that ran out of memory was followed by a step at least once.
        assert len(answer.raised) > 1
        assert all(after == NOTHING for message, after in zip(answer.raised, answer.held) if message)
        assert answer.error < BOUND < answer.moved
        ended = answer.ended
        assert ended is None or "ranks sent different gradients" in ended or names_the_bucket(ended)


# Ranks that run another number of backwards ----------------------------------------------------------------------


class Counted(NamedTuple):
    """What came of a step."""

    raised: Optional[str]
    moved: bool  # whether it changed parameters


def another_number_of_backwards(case):
    """Rank 0 runs a backward more in step 1, and all ranks the same in steps 0 and 2. Lists what came of each."""
    torch._dynamo.reset()
    module = build(case)
    engine = make_engine(module, case)
    seen = []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in module.parameters()]
        raised = None
        try:
            for micro_step in range(2 if step == 1 and dist.get_rank() == 0 else 1):
                engine.backward(engine(batch(step, micro_step, dist.get_rank(), 4)))
            engine.step()
        except RuntimeError as error:
            raised = str(error)
        moved = any(not torch.equal(old, new) for old, new in zip(before, module.parameters()))
        seen.append(Counted(raised, moved))
    engine.destroy()
    return seen


@pytest.mark.parametrize("bucket", [50, 10**6], ids=["buckets", "one-bucket"])
def test_another_number_of_backwards(ranks, bucket, capfd):
    """Gradients of two different backwards would be averaged where one rank runs one more, and steps go on."""
    case = case_of(stage=2, bucket=bucket)
    if torch.cuda.is_available():
        answers = in_processes_of_their_own(another_number_of_backwards, case)
    else:
        answers = ranks(2).run(another_number_of_backwards, case)
    # One rank's reductions met the other rank's norm, and NCCL waits for ever where sizes differ.
    for before, apart, together in not_ended_by_nccl(answers, capfd).values():
        assert before.raised is None and before.moved
        # Its gradients were added to those of another backward. Nothing may use them, nor what comes after.
        for step in (apart, together):
            assert "ranks sent different gradients" in step.raised
            assert not step.moved


# Ranks that die, hang or raise -----------------------------------------------------------------------------------


class Steps(NamedTuple):
    """What came of steps in the first of which one rank has a fault."""

    raised: List[Optional[str]]  # by each step
    seconds: float  # for all of them


def on_one_rank(case, how, rank, steps=3):
    """A fault in the backward of ``rank``, which goes on if it can."""
    from deepspeed.accelerator import get_accelerator

    engine = fragile(case).engine
    # Longer than the others wait.
    patience = engine.data_parallel_group._get_backend(device()).options._timeout.total_seconds()
    happenings = {
        "raises": raise_injected,
        "dies": lambda: os._exit(17),
        "hangs": lambda: time.sleep(patience + 2),
    }
    train_step(engine, 0, case.accumulation)
    begun, raised = time.monotonic(), []
    for step in range(1, 1 + steps):
        if step == 1 and dist.get_rank() == rank:
            in_backward.happen = happenings[how]
        try:
            train_step(engine, step, case.accumulation)
            # On a GPU the host may have taken the step before a collective's time is over.
            get_accelerator().synchronize()
            raised.append(None)
        except (RuntimeError, Injected) as error:
            raised.append(f"{type(error).__name__}: {error}")
    return Steps(raised, time.monotonic() - begun)


def test_a_rank_that_dies(capfd):
    """The other rank would wait for ever, or end with an error that does not say for what it has waited."""
    answers = in_processes_of_their_own(on_one_rank, case_of(bucket=50), "dies", 1, 1)
    assert answers[1] == "died with exit status 17"
    first = not_ended_by_nccl(answers, capfd).get(0)
    assert first is None or (names_the_bucket(first.raised[0]) and first.seconds < TIMEOUT + GRACE)


def test_a_rank_that_hangs(capfd):
    """A rank would wait longer than its process group's timeout, and the late one would go on by itself."""
    answers = not_ended_by_nccl(in_processes_of_their_own(on_one_rank, case_of(bucket=50), "hangs", 1, 1), capfd)
    for answer in answers.values():
        assert names_the_bucket(answer.raised[0])
    if 0 in answers:
        assert "Timed out" in answers[0].raised[0] and TIMEOUT - 1 < answers[0].seconds < TIMEOUT + GRACE
    if 1 in answers:
        # It comes too late.
        assert answers[1].seconds < 2 * TIMEOUT + GRACE


@vary("stage, accumulation", [(1, 3), (2, 2)])
def test_a_backward_that_raises_on_one_rank(stage, accumulation, capfd):
    """The other rank would take a step that this one does not take, and both would train on apart."""
    case = case_of(stage=stage, accumulation=accumulation, bucket=50)
    answers = in_processes_of_their_own(on_one_rank, case, "raises", 1)
    for rank, answer in not_ended_by_nccl(answers, capfd).items():
        # It never gets another step, whatever it tries.
        assert all(answer.raised)
        assert rank == 0 or answer.raised[0].startswith("Injected")


def apart_after_a_checkpoint(case, how, folder):
    """Takes a step and saves it. Returns what is raised where one rank then dies in a backward, or runs one more."""
    engine = fragile(case).engine
    train_step(engine, 0, 1)
    engine.save_checkpoint(folder)
    if how == "dies" and dist.get_rank() == 1:
        in_backward.happen = lambda: os._exit(17)

    def step():
        for micro_step in range(2 if how == "runs one more" and dist.get_rank() == 1 else 1):
            engine.backward(engine(batch(1, micro_step, dist.get_rank(), 4)))
        engine.step()

    return outcome(step)


def resumed(case, folder):
    """Loads that step, and takes two more. Returns the error beside a plain loop that takes all three."""
    pair = fragile(case)
    pair.engine.load_checkpoint(folder)
    pair.train_plain(0)
    for step in (1, 2):
        pair.step(step)
    return pair.last_error()


@pytest.mark.follows(
    "look for the first error of any rank, and start the processes again from a checkpoint",
    "Restart from a checkpoint",
)
@vary(
    "how, says",
    [
        ("dies", "look for the first error of any rank, and start the processes again from a checkpoint: "),
        ("runs one more", "or one raised. Restart from a checkpoint."),
    ],
    expects="says",
)
def test_ranks_that_are_apart_start_again(tmp_path, capfd, how, says):
    """What errors of other ranks advise would not bring a training back to where it was saved."""
    case = case_of(stage=2, bucket=50)
    answers = in_processes_of_their_own(apart_after_a_checkpoint, case, how, str(tmp_path))
    assert (answers[1] == "died with exit status 17") == (how == "dies")
    for rank, said in not_ended_by_nccl(answers, capfd).items():
        assert says in said or (rank == 1 and how == "dies")
    assert all(error < BOUND for error in in_processes_of_their_own(resumed, case, str(tmp_path)))


class Attempt(NamedTuple):
    """What one call came to."""

    raised: Optional[str]
    seconds: float


def dies_in_the_optimizer(case, rank):
    """``rank`` dies while it is stepped. Returns what the others' step came to, and what they try afterwards."""
    engine = fragile(case).engine
    train_step(engine, 0, 1)
    if dist.get_rank() == rank:
        engine.optimizer.optimizer.step = lambda: os._exit(17)
    results = {}
    engine.backward(engine(batch(1, 0, dist.get_rank(), 4)))
    attempts = {
        "step": engine.step,
        "forward": lambda: engine(batch(2, 0, dist.get_rank(), 4)),
        "save": lambda: engine.optimizer.state_dict(),
        "destroy": engine.destroy,
    }
    for name, attempt in attempts.items():
        begun = time.monotonic()
        try:
            attempt()
            raised = None
        except RuntimeError as error:
            raised = str(error)
        results[name] = Attempt(raised, time.monotonic() - begun)
    return results


@pytest.mark.skipif(torch.cuda.is_available(), reason="with NCCL a step returns before its parameters have arrived")
def test_a_rank_that_dies_in_the_optimizer():
    """Parameters that a dead rank has not sent would be trained or saved as they are."""
    first, second = in_processes_of_their_own(dies_in_the_optimizer, Case(), 1)
    assert second == "died with exit status 17"
    assert "could not get the parameters that other ranks have stepped" in first["step"].raised
    for then in ("forward", "save"):
        assert "was ended half way" in first[then].raised and "load a checkpoint" in first[then].raised
    assert first["destroy"].raised is None
    assert all(attempt.seconds < TIMEOUT + GRACE for attempt in first.values())
