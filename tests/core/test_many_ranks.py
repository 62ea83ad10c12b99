# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""As many ranks as eight hosts of eight GPUs have, as processes of one machine."""

import pytest

from support.training import Case, check_trained, train_beside_plain_loop

RANKS = 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "compile_section",
    [
        {"regional_compilation": True, "overlap_param_gather": True},
        {"regional_compilation": True, "shard_parameters": "all"},
    ],
    ids=["kept", "sharded"],
)
def test_many_ranks(ranks, compile_section):
    """Most shards are padding alone, and most ranks own nothing of a small parameter: they would send or keep the
    elements of others."""
    case = Case(model="BlocksWithin", stage=2, accumulation=2, steps=2, config={"compile": compile_section})
    check_trained(ranks(RANKS).run(train_beside_plain_loop, case))
