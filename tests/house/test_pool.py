# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The processes in which tests run: what ``support.pool`` does where they do not answer."""

import time

import pytest
import torch.distributed as dist

from support import pool


def test_a_rank_that_does_not_start_is_named(monkeypatch):
    """A test would wait without end, and without a word, for a rank that waits for a lock that nobody holds."""
    monkeypatch.setattr(pool, "TIME_TO_START", 0.0)
    ranks = pool.Ranks(1)
    with pytest.raises(pool.RankFailed, match="rank 0 did not start within 0.0 s; it may wait for native code"):
        ranks.start()
    assert not ranks.started


def raise_on_the_second_rank():
    if dist.get_rank() == 1:
        raise ValueError("of rank 1")
    dist.barrier()


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_failed(ranks):
    """A test of which only the second rank fails would take ten minutes, while the first one waits."""
    pair = ranks(2)
    if not pair.started:
        pair.start()
    began = time.monotonic()
    with pytest.raises(pool.RankFailed, match="(?s)rank 0 gave no answer.*rank 1 raised:.*ValueError: of rank 1"):
        pair.run(raise_on_the_second_rank)
    assert time.monotonic() - began < 60
