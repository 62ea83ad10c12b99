# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``engine.compile()`` that raises while it sets the engine up leaves the engine as it was."""

from unittest import mock

import pytest
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2.engine import set_up as setup
from deepspeed.compile.zero_1_and_2.step import even_order

from support.faults import Injected
from support.ids import vary
from support.on_ranks import on_ranks
from support.options import outcome, prepare, set_up_state, train_prepared
from support.training import BOUND, OVERLAPPED, Case, batch


@vary("compiled_again", [True, False])
@vary(
    "step, config, offloaded",
    [
        ("attach", None, False),
        ("attach", OVERLAPPED, False),
        ("attach", OVERLAPPED, True),
        ("Backend", OVERLAPPED, False),
    ],
)
@vary("stage", [1, 2])
@on_ranks(2)
def test_a_setup_that_raises_is_undone(stage, step, config, offloaded, compiled_again):
    """Hooks, registrations or the optimizer's class would stay of a setup that did not come to its end."""
    case = Case(model="RepeatedLayers", stage=stage, config=config, offloaded=offloaded)
    module, engine = prepare(case)
    before, reducers, make_reducer = set_up_state(module, engine), [], setup.make_reducer

    def noted(*args):
        reducers.append(make_reducer(*args))
        return reducers[-1]

    with (
        mock.patch.object(setup, "make_reducer", noted),
        mock.patch.object(setup, step, side_effect=Injected),
        pytest.raises(Injected),
    ):
        engine.compile(backend="eager")
    is_as_before = set_up_state(module, engine) == before
    if compiled_again:
        engine.compile(backend="eager")
        assert hasattr(engine.optimizer, "_deepcompile")
    registered = reducers[0].counters()["registered"]
    # An engine does not compile itself afterwards.
    assert train_prepared(case, module, engine) < BOUND
    assert is_as_before and registered == 0


@vary("offloaded", [False, True])
@on_ranks(2)
def test_elements_that_change_places_half_way(offloaded):
    """DeepSpeed's own step would take elements of one order for those of the other, and save them so."""
    module, engine = prepare(Case(groups=2, offloaded=offloaded))
    adopt_group = even_order._adopt_group

    def raises(optimizer, group, *others):
        if group:
            raise Injected("no memory")
        adopt_group(optimizer, group, *others)

    with mock.patch.object(even_order, "_adopt_group", raises):
        said = outcome(engine.compile, backend="eager")
    loss = engine(batch(0, 0, dist.get_rank(), 4))
    later = [outcome(engine.backward, loss), outcome(engine.optimizer.step), outcome(engine.optimizer.state_dict)]
    engine.destroy()
    assert said == "Injected: no memory"
    for refused in later:
        assert "engine.compile() failed half-way (no memory); create a new engine" in refused
