# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters of blocks that a rank skips last in a forward, and of blocks to which a forward comes back."""

from unittest import mock

from test_shard_frozen import compare

from support.frozen import MODELS, model_of


def without_last(self, x, skip):
    """Leaves out the blocks that a forward comes to last, of which it would begin to gather the first in any case."""
    for block in self.blocks[:-2] if skip else self.blocks:
        x = block(x)
    return x


def compare_without_last():
    with mock.patch.dict(MODELS, {"without last": model_of(run=without_last)}):
        return compare("without last", bucket=10**6, stage=2, skips=True, steps=2)


def test_a_rank_that_skips_the_last_blocks(ranks):
    """The other rank would wait for this rank's part, or take what comes next for it."""
    for result in ranks(2).run(compare_without_last, timeout=60):
        assert result.same and result.most_gathered == 2


def test_a_forward_that_comes_back_to_earlier_blocks(ranks):
    """Their frozen parameters were given back, and reading them would end the process."""
    for result in ranks(2).run(compare, "again", stage=2, steps=2):
        assert result.same and result.most_gathered == 2
