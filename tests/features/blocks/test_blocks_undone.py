# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``engine.compile()`` that raises while blocks get their calls leaves the engine as it was."""

from unittest import mock

import pytest

from deepspeed.compile.features.blocks import block_calls

from support.faults import Injected
from support.on_ranks import on_ranks
from support.options import prepare, set_up_state, train_prepared
from support.training import BOUND, OVERLAPPED, Case


@on_ranks(2)
def test_a_block_that_raises_is_undone():
    """The blocks before the one that raised would keep their compiled calls."""
    case = Case(model="RepeatedLayers", config=OVERLAPPED)
    module, engine = prepare(case)
    before, blocks = set_up_state(module, engine), []
    put_in = block_calls.BlockCall.put_in

    def raises_at_the_third(call):
        put_in(call)
        blocks.append(call)
        if len(blocks) == 3:
            raise Injected("third block")

    with mock.patch.object(block_calls.BlockCall, "put_in", raises_at_the_third):
        with pytest.raises(Injected):
            engine.compile(backend="eager")
    assert len(blocks) == 3
    assert set_up_state(module, engine) == before and train_prepared(case, module, engine) < BOUND
