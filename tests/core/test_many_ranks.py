# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""As many ranks as eight hosts of eight GPUs have, as processes of one machine."""

import pytest

from support.training import Case, check_trained, train_beside_plain_loop

RANKS = 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "compile_section, stage",
    [
        ({"regional_compilation": False}, 1),
        ({"regional_compilation": True, "overlap_param_gather": True}, 2),
        ({"regional_compilation": True, "shard_parameters": "all"}, 2),
    ],
    ids=["whole", "blocks", "sharded"],
)
def test_many_ranks(ranks, compile_section, stage):
    """Most shards are padding alone, and most ranks own nothing of a small parameter: they would send or keep the
    elements of others."""
    case = Case(model="BlocksWithin", stage=stage, accumulation=2, steps=2, config={"compile": compile_section})
    check_trained(ranks(RANKS).run(train_beside_plain_loop, case))
