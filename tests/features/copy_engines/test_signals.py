# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Signals between ranks in shared memory, and the bound on how long a rank waits for one."""

import contextlib
import mmap
import multiprocessing
import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepspeed.compile.features.copy_engines.mapped import SHARED, native, shared_words
from deepspeed.compile.zero_1_and_2.collectives import collective

from support.ids import vary
from support.on_ranks import on_ranks
from support.options import outcome

pytestmark = pytest.mark.options("compile.copy_engines")
STAGED, PULLED = 0, 1


@pytest.fixture
def words():
    """Memory that forked processes share, as ranks do: for two ranks."""
    shape = (3, native().CHANNELS, native().NUMBERS_OF_A_WORD)
    return torch.frombuffer(mmap.mmap(-1, 4 * torch.Size(shape).numel()), dtype=torch.int32).view(shape)


def signals(words, rank=0, timeout=60.0):
    return native().Signals(words=words, rank=rank, timeout=timeout)


def signed(number):
    """An int32 with the bits of a number modulo 2**32."""
    return (number + 2**31) % 2**32 - 2**31


@pytest.mark.quick
def test_a_signal_of_another_process_ends_the_wait(words):
    """Without this, the host could go on before the signals of all channels have come, or never."""

    def post():
        time.sleep(0.05)
        words[1, PULLED, 0] = 4
        time.sleep(0.05)
        words[1, STAGED, 0] = 7
        os._exit(0)

    own = signals(words)
    own.expect(STAGED, 7)
    own.expect(PULLED, 3)
    peer = multiprocessing.get_context("fork").Process(target=post)
    peer.start()
    own.wait_for_all()
    assert words[1, STAGED, 0] == 7
    peer.join()
    own.check()


@pytest.mark.quick
def test_numbers_may_wrap_around(words):
    """Without this, a run could hang after 2**32 signals."""
    words[1, STAGED, 0] = signed(2**32 - 2)
    own = signals(words)
    own.expect(STAGED, 2**32 - 3)
    own.wait_for_all()
    own.expect(STAGED, 1)
    words[1, STAGED, 0] = 1
    own.wait_for_all()


@pytest.mark.quick
def test_ranks_exchange_numbers_on_the_host(words):
    """A rank that is one exchange ahead would write over numbers that another one still reads."""

    def other():
        own = signals(words, rank=1)
        for number in range(300):
            assert own.exchange([number, -number, 2**62]) == [-number, number, 2**40, number, -number, 2**62]
        os._exit(0)

    peer = multiprocessing.get_context("fork").Process(target=other)
    peer.start()
    own = signals(words)
    for number in range(300):
        assert own.exchange([-number, number, 2**40]) == [-number, number, 2**40, number, -number, 2**62]
    peer.join()
    assert peer.exitcode == 0


def test_ranks_that_disagree_let_their_streams_go(words):
    """Without this, streams would wait for a rank that sends less until the time-out, and so would an exit."""
    reason = "ranks sent different gradients"

    def other():
        signals(words, rank=1).exchange([2])
        os._exit(0)

    peer = multiprocessing.get_context("fork").Process(target=other)
    peer.start()
    own = signals(words)
    own.expect(STAGED, 5)
    assert own.exchange([1]) == [1, 2]
    peer.join()
    own.give_up(reason)
    deadline = time.perf_counter() + 60
    while words[1, STAGED, 0] < 5:
        assert time.perf_counter() < deadline
        time.sleep(0.005)
    with pytest.raises(torch.distributed.DistBackendError, match=reason):
        own.check()


def test_a_rank_that_gives_up_after_an_exchange_does_not_end_it_for_others(words):
    """A slower rank would learn that another has given up, and not why."""
    own, other = signals(words), signals(words, rank=1)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(own.exchange([1])))
    thread.start()
    other.exchange([2])
    thread.join()
    assert answers == [[1, 2]]
    # This rank's next numbers have come when the other rank gives up, and it has not looked at them yet.
    thread = threading.Thread(target=lambda: answers.append(own.exchange([3])))
    thread.start()
    assert other.exchange([4]) == [3, 4]
    other.give_up("because")
    thread.join()
    assert answers[1:] == [[3, 4]]
    with pytest.raises(torch.distributed.DistBackendError, match="rank 1 has given up"):
        own.check()


def test_a_rank_without_numbers_ends_the_exchange(words):
    """The host would wait for ever for a rank that has died before it gave its numbers."""
    own = signals(words, timeout=0.2)
    with pytest.raises(torch.distributed.DistBackendError, match="rank 0 has waited 0 seconds for a signal of rank 1"):
        own.exchange([1])


@pytest.mark.follows("look for the first error of any rank")
def test_a_rank_that_does_not_come_ends_all_in_the_sentence_of_a_timeout(words):
    """Without this, streams could wait for ever for a rank that has died, and the host with them."""
    own, other = signals(words, timeout=0.2), signals(words, rank=1)
    begun = time.perf_counter()
    own.expect(STAGED, 5)
    with pytest.raises(torch.distributed.DistBackendError, match="could not send") as error:
        with collective("send"):
            own.wait_for_all()
    assert 0.2 <= time.perf_counter() - begun < 60
    assert "rank 0 has waited 0 seconds for a signal of rank 1" in str(error.value)
    # The other rank lives, and finds it in its next call.
    with pytest.raises(torch.distributed.DistBackendError, match="rank 0 has given up"):
        other.check()


@vary("last", [5, 2**31 + 5])
def test_released_words_stay_released(words, last):
    """Without this, a living rank's stream could write its smaller number over a released word, and others hang.

    In a long run, streams would take a released word for a smaller number.
    """
    words[:2, STAGED, 0] = signed(last - 3)
    own = signals(words, timeout=0.1)
    own.expect(STAGED, last)
    with pytest.raises(torch.distributed.DistBackendError):
        own.wait_for_all()

    def are_released():
        # As a stream compares.
        return all(signed(int(word) - last) >= 0 for word in words[:2, STAGED, 0])

    for number in (last - 2, last - 1):
        words[1, STAGED, 0] = signed(number)
        deadline = time.perf_counter() + 60
        while not are_released():
            assert time.perf_counter() < deadline
            time.sleep(0.005)
    # Streams of other ranks wait for this rank's words, and in all channels but the last, which hosts look at.
    assert bool((words[:2, PULLED:-1, 0] >= 5).all())


def test_a_rank_that_expects_something_after_another_gave_up_is_released(words):
    """Without this, a rank whose watcher slept could hang on signals that it awaits after another rank gave up."""
    own, other = signals(words, timeout=0.1), signals(words, rank=1, timeout=60.0)
    own.expect(STAGED, 1)
    with pytest.raises(torch.distributed.DistBackendError):
        own.wait_for_all()
    del own
    words[:2] = 0
    other.expect(PULLED, 9)
    with pytest.raises(torch.distributed.DistBackendError):
        other.wait_for_all()
    deadline = time.perf_counter() + 60
    while words[0, PULLED, 0] < 9:
        assert time.perf_counter() < deadline
        time.sleep(0.005)


def test_waiting_releases_the_interpreter(words):
    """Without this, no other thread of Python could run while the host waits for a rank."""
    own = signals(words)
    own.expect(STAGED, 1)
    thread = threading.Timer(0.05, lambda: words[1, STAGED].fill_(1))
    thread.start()
    own.wait_for_all()
    thread.join()


def test_words_of_another_shape_are_refused():
    """Without this, a rank could write beyond the words."""
    with pytest.raises(ValueError, match="words of signals must be"):
        signals(torch.zeros(3, 1, 1, dtype=torch.int32))


@on_ranks(3)
def test_ranks_share_words():
    """Without this, ranks could map different memory, and files could be left in memory for ever."""
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    before = set(Path(SHARED).glob("deepcompile-signals-*"))
    for number in range(2):
        words = shared_words(group)
        assert not bool(words.any())
        torch.distributed.barrier()
        words[rank, PULLED, 0] = 10 * number + rank + 1
        torch.distributed.barrier()
        assert words[:, PULLED, 0].tolist() == [10 * number + other + 1 for other in range(3)] + [0]
    assert not set(Path(SHARED).glob("deepcompile-signals-*")) - before


@on_ranks(2)
def test_a_rank_that_cannot_map_the_words_ends_all():
    """Without this, ranks in containers with memory of their own could wait for each other for ever."""
    rank = torch.distributed.get_rank()
    # The second rank does not find the first one's file.
    absent = mock.patch(f"{shared_words.__module__}.open", create=True, side_effect=FileNotFoundError)
    with absent if rank else contextlib.nullcontext():
        said = outcome(shared_words, torch.distributed.group.WORLD)
    causes = ("RuntimeError: rank 1 could not map another rank's memory for signals", "FileNotFoundError")
    assert said.startswith(causes[rank])


@pytest.mark.quick
def test_the_rank_that_stands_behind_is_named():
    """Without this, the error could name a rank that itself waits for the one that has died."""
    words = torch.zeros(5, native().CHANNELS, native().NUMBERS_OF_A_WORD, dtype=torch.int32)
    words[:4, STAGED, 0] = torch.tensor([0, 3, 3, 1])
    own = signals(words, timeout=0.1)
    own.expect(STAGED, 5)
    with pytest.raises(torch.distributed.DistBackendError, match="for a signal of rank 3"):
        own.wait_for_all()
