# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the core itself refuses: a torch that is too old, and an engine that was compiled half-way."""

import importlib
from unittest import mock

import pytest
import torch

from deepspeed.compile.zero_1_and_2.engine import calls
from deepspeed.compile.zero_1_and_2.engine import options as zero_options
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from support.ids import vary
from support.on_ranks import on_ranks
from support.options import SMALL, outcome, prepare, train_prepared
from support.training import BOUND, Case, make_engine


@pytest.mark.follows("is too old; install torch {} or newer")
@on_ranks(1)
def test_refused_with_an_old_torch():
    """Training would fail in a torch that lacks what graphs need, or be refused in one that is nearly the oldest."""
    said = []
    for oldest in ("99.1", f"{'.'.join(torch.__version__.split('.')[:2])}.99"):
        with mock.patch.object(zero_options, "OLDEST_TORCH", oldest):
            said.append(outcome(prepare, Case(model=SMALL)))
    refusal = (
        f"ValueError: DeepCompile with ZeRO stage 1: torch {torch.__version__} is too old; install torch 99.1 or newer"
    )
    assert said == [refusal, None]


def compile_twice(fails, function, stage):
    """Returns what a second engine.compile() raises. Trains the engine thereafter, and one that is made anew.

    ``fails``, ``function``: the module and the name of the function that fails in the first engine.compile().
    """
    case = Case(model=SMALL, stage=stage)
    module, engine = prepare(case)
    # len() is not to be called with these arguments.
    with mock.patch.object(importlib.import_module(fails), function, len):
        first = outcome(engine.compile, backend="eager")
    second = outcome(engine.compile, backend="eager")
    error = train_prepared(case, module, engine)
    assert max(error, train_prepared(case, module, make_engine(module, case))) < BOUND
    assert first == "TypeError: len() takes no keyword arguments"
    return second


@vary("stage", [1, 2])
@on_ranks(1)
def test_compiled_after_torch_failed(stage):
    """An engine could not be compiled after torch.compile() has failed, although nothing of the first try is left."""
    assert compile_twice("torch", "compile", stage) is None


@pytest.mark.follows("failed half-way; create a new engine", "failed half-way ({}); create a new engine")
@vary("stage", [1, 2])
@on_ranks(1)
def test_refused_after_half_a_compile(stage):
    """A second engine.compile() would set up an engine twice that the first has left half-way."""
    assert compile_twice(calls.__name__, "compile_module", stage) == (
        f"ValueError: DeepCompile with ZeRO stage {stage}: an earlier engine.compile() failed half-way; "
        "create a new engine"
    )


class Counting(DeepSpeedZeroOptimizer):
    """A user's own wrapper of optimizers, which counts steps."""

    steps = 0

    def step(self, *args, **kwargs):
        self.steps += 1
        super().step(*args, **kwargs)


def train_with_another_wrapper(deepcompile):
    """Returns what engine.compile() raises or, without DeepCompile, the error of training and the steps counted."""
    case = Case(model=SMALL, config={"compile": {"deepcompile": deepcompile}})
    module, engine = prepare(case)
    engine.optimizer.__class__ = Counting
    optimizer, said = engine.optimizer, outcome(engine.compile, backend="eager")
    if said is not None:
        engine.destroy()
        return said
    return train_prepared(case, module, engine), optimizer.steps


@pytest.mark.follows("optimizer wrapper {} is not supported; set compile.deepcompile to false")
def test_an_optimizer_wrapper_of_the_user(ranks):
    """What a wrapper adds to a step would be lost, or DeepSpeed without DeepCompile would lose it too."""
    for said in ranks(2).run(train_with_another_wrapper, True):
        assert said == (
            "ValueError: DeepCompile with ZeRO stage 1: optimizer wrapper Counting is not supported; set "
            "compile.deepcompile to false"
        )
    for error, steps in ranks(2).run(train_with_another_wrapper, False):
        assert error < BOUND and steps == 2
