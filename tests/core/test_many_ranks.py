# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""As many ranks as eight hosts of eight GPUs have, as processes of one machine."""

import pytest

from support.training import OVERLAPPED, Case, check_trained, train_beside_plain_loop

RANKS = 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [OVERLAPPED, {"compile": {"regional_compilation": True, "shard_parameters": "all"}}],
    ids=["kept", "sharded"],
)
def test_many_ranks(ranks, config):
    """Most shards are padding alone, and most ranks own nothing of a small parameter: they would send or keep the
    elements of others."""
    case = Case(model="BlocksWithin", stage=2, accumulation=2, steps=2, config=config)
    check_trained(ranks(RANKS).run(train_beside_plain_loop, case))
