# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``engine.compile()`` that raises while it sets the engine up leaves the engine as it was."""

from typing import NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2.engine import set_up as setup
from deepspeed.compile.zero_1_and_2.step import even_order

from support.faults import Injected
from support.ids import vary
from support.options import outcome, prepare, set_up_state, train_prepared
from support.training import BOUND, OVERLAPPED, Case, batch


class Undone(NamedTuple):
    """What came of an engine of which a step of the setup raised."""

    is_as_before: bool  # the module and the optimizer
    registered: int  # parameters of the reducer
    error: float  # of training it afterwards


def compile_with_a_step_that_raises(case, step, compiled_again):
    """``step``: the name of a function of the setup. Trains the engine afterwards, which does not compile itself."""
    module, engine = prepare(case)
    before, reducers = set_up_state(module, engine), []
    own_step, make_reducer = getattr(setup, step), setup.make_reducer

    def raises(*_):
        raise Injected(f"no {step}")

    def noted(*args):
        reducers.append(make_reducer(*args))
        return reducers[-1]

    setup.make_reducer = noted
    setattr(setup, step, raises)
    try:
        with pytest.raises(Injected):
            engine.compile(backend="eager")
    finally:
        setattr(setup, step, own_step)
        setup.make_reducer = make_reducer
    is_as_before = set_up_state(module, engine) == before
    if compiled_again:
        engine.compile(backend="eager")
        assert hasattr(engine.optimizer, "_deepcompile")
    return Undone(is_as_before, reducers[0].counters()["registered"], train_prepared(case, module, engine))


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
def test_a_setup_that_raises_is_undone(ranks, stage, step, config, offloaded, compiled_again):
    """Hooks, registrations or the optimizer's class would stay of a setup that did not come to its end."""
    case = Case(model="RepeatedLayers", stage=stage, config=config, offloaded=offloaded)
    for undone in ranks(2).run(compile_with_a_step_that_raises, case, step, compiled_again):
        assert undone.is_as_before and undone.registered == 0
        assert undone.error < BOUND


def fail_between_orders(case):
    """Returns what an engine says of which one parameter group is in the order of our layout, and others are not."""
    module, engine = prepare(case)
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
    return said, later


@vary("offloaded", [False, True])
def test_elements_that_change_places_half_way(ranks, offloaded):
    """DeepSpeed's own step would take elements of one order for those of the other, and save them so."""
    for said, later in ranks(2).run(fail_between_orders, Case(groups=2, offloaded=offloaded)):
        assert said == "Injected: no memory"
        for refused in later:
            assert "engine.compile() failed half-way (no memory); create a new engine" in refused
