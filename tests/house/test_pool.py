# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The processes in which tests run: what ``support.pool`` does where they do not answer."""

import time

import pytest
import torch.distributed as dist

from support import pool
from support.on_ranks import gathered, on_ranks


def test_a_rank_that_does_not_start_is_named(monkeypatch):
    """A test would wait without end, and without a word, for a rank that waits for a lock that nobody holds."""
    monkeypatch.setattr(pool, "TIME_TO_START", 0.0)
    ranks = pool.Ranks(1)
    with pytest.raises(pool.RankFailed, match="rank 0 did not start within 0.0 s; it may wait for native code"):
        ranks.start()
    assert not ranks.started


@on_ranks(2)
def test_ranks_see_each_other():
    """A test that runs on one rank alone would compare it with itself."""
    assert gathered(dist.get_rank()) == [0, 1]


@on_ranks(2)
def fails_on_the_second_rank(value):
    assert dist.get_rank() == value
    dist.barrier()


@on_ranks(2)
def skips(rank):
    if dist.get_rank() == rank or rank is None:
        pytest.skip("no reason")


@pytest.mark.slow
def test_what_fails_on_a_rank(ranks):
    """Who reads the log would not see the values of an assertion that fails on a rank.

    Or a test of which only the second rank fails would take ten minutes, while the first one waits.
    """
    if not ranks(2).started:
        ranks(2).start()
    began = time.monotonic()
    says = "(?s)^rank 0 gave no answer.*rank 1 raised:.*assert 1 == 0.* where 1 = <function get_rank"
    with pytest.raises(pool.RankFailed, match=says):
        fails_on_the_second_rank(ranks=ranks, value=0)
    assert time.monotonic() - began < 60
    with pytest.raises(pytest.skip.Exception, match="no reason"):
        skips(ranks=ranks, rank=None)
    with pytest.raises(AssertionError, match=r"some ranks alone skipped the test: \[None, 'no reason'\]"):
        skips(ranks=ranks, rank=1)
