# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An error on one rank while an engine is set up: every rank raises at once, and none waits for another one."""

import contextlib
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2.collectives import every_rank_raises
from deepspeed.compile.zero_1_and_2.engine import set_up
from deepspeed.compile.zero_1_and_2.feature import Feature
from deepspeed.compile.zero_1_and_2.parameter.carrier import Carrier, Collectives

from support.faults import Injected
from support.ids import vary
from support.on_ranks import on_ranks
from support.options import outcome, prepare, train_prepared
from support.training import BOUND, Case

REFUSED = "DeepCompile with ZeRO stage 1: gradients computed before engine.compile() would be lost"


class Raises(Feature):
    """A part whose set-up raises."""

    def __init__(self, context):
        raise Injected("no part")


def raise_injected(*_):
    raise Injected("on purpose")


# Where -> a function of the set-up, and what stands in its place.
FAULTS = {
    "part": ("classes", lambda: (Raises,)),
    "native": ("reducer_module", raise_injected),
    "step": ("take_over_parameters", raise_injected),
}


@vary("rank", [0, 1])
@vary("where", ["gradient", "part", "native", "step"])
@on_ranks(2, timeout=300)
def test_an_error_on_one_rank(rank, where):
    """The other rank would wait in its first collective until its time is up, and then blame something else."""
    module, engine = prepare(Case())
    first, begun = next(module.parameters()), time.monotonic()
    is_apart = dist.get_rank() == rank
    if where == "gradient" and is_apart:
        first.grad = torch.zeros_like(first)
    faulty = is_apart and where in FAULTS
    with mock.patch.object(set_up, *FAULTS[where]) if faulty else contextlib.nullcontext():
        said = outcome(engine.compile, backend="eager")
    seconds, first.grad = time.monotonic() - begun, None
    # Without DeepCompile.
    assert train_prepared(Case(), module, engine) < BOUND
    assert seconds < 300
    assert said.startswith(("Injected: ", "RuntimeError: ", "ValueError: "))
    assert {"gradient": REFUSED, "part": "no part"}.get(where, "on purpose") in said
    if is_apart:
        assert "so no rank goes on" not in said
    else:
        assert f"rank {rank} could not set an engine up, so no rank goes on. It says:" in said


def raise_by_kind(kinds):
    kind, own = kinds[dist.get_rank()], None
    try:
        with every_rank_raises("do it"):
            if kind is not None:
                own = kind("mine")
                raise own
    except Exception as error:
        return type(error).__name__, str(error), error is own
    return None


@pytest.mark.quick
def test_which_error_each_rank_raises(ranks):
    """A rank would raise another one's error in place of its own, or a caller not catch it as the kind that it is."""
    run = ranks(2).run
    assert run(raise_by_kind, [None, None]) == [None, None]
    other, own = run(raise_by_kind, [None, ValueError])
    assert own == ("ValueError", "mine", True)
    text = "rank 1 could not do it, so no rank goes on. It says: ValueError: mine"
    assert other == ("ValueError", text, False)
    assert run(raise_by_kind, [OSError, None])[1][0] == "RuntimeError"
    assert [answer[2] for answer in run(raise_by_kind, [KeyError, ValueError])] == [True, True]


@on_ranks(2, timeout=120)
def test_memory_for_parameters_that_one_rank_lacks():
    """The other rank would wait until the time-out in what follows, and name something else."""
    lacks = mock.patch.object(Carrier, "flat_tensor", side_effect=MemoryError("too much"))
    with lacks if dist.get_rank() else contextlib.nullcontext():
        said = outcome(Collectives(dist.group.WORLD).flat_tensor, 4, torch.ones(1))
    told = "rank 1 could not make room for parameters, so no rank goes on. It says: MemoryError: too much"
    assert said == ("MemoryError: too much" if dist.get_rank() else f"RuntimeError: {told}")
