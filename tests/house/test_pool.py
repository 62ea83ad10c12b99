# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The processes in which tests run: what ``support.pool`` does where they do not answer."""

import pytest

from support import pool


def test_a_rank_that_does_not_start_is_named(monkeypatch):
    """A test would wait without end, and without a word, for a rank that waits for a lock that nobody holds."""
    monkeypatch.setattr(pool, "TIME_TO_START", 0.0)
    ranks = pool.Ranks(1)
    with pytest.raises(pool.RankFailed, match="rank 0 did not start within 0.0 s; it may wait for native code"):
        ranks.start()
    assert not ranks.started
