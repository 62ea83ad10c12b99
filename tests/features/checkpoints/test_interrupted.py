# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""After a step that an exception ended while it changed parameters, an engine goes on only from a checkpoint."""

import copy
import pickle
from unittest import mock

import pytest
import torch

from deepspeed.compile.zero_1_and_2.engine.state import EngineState

from support.faults import Injected, half_a_step
from support.ids import vary
from support.training import BOUND, Case


def state_of_nothing(engine):
    """Returns the state of an engine of which a test uses what it keeps of an interrupted step."""
    engine.optimizer, features, layouts = mock.Mock(), [], []
    return EngineState(engine, mock.Mock(), features, mock.Mock(), layouts)


@pytest.mark.quick
def test_a_copy_after_half_a_step():
    """A module whose step was ended half way could not be copied, or its copies would refuse to be saved."""
    module, engine = torch.nn.Linear(2, 2), torch.nn.Module()
    engine.module = module
    state = state_of_nothing(engine)
    with pytest.raises(Injected), state.updating():
        raise Injected("half way")
    for duplicate in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert duplicate.state_dict().keys() == {"weight", "bias"}
    assert b"deepspeed" not in pickle.dumps(module)
    with pytest.raises(RuntimeError, match="was ended half way"):
        module.state_dict()
    state.forget_interruption()
    module.state_dict()


@pytest.mark.quick
def test_half_a_step_without_an_engine():
    """Where only the engine's optimizer still exists, another error would take the place of the step's own."""
    engine = torch.nn.Module()
    state = state_of_nothing(engine)
    del engine
    with pytest.raises(Injected, match="half way"), state.updating():
        raise Injected("half way")
    with pytest.raises(RuntimeError, match="was ended half way"):
        state.refuse_after_interruption()


@pytest.mark.follows("load a checkpoint with its optimizer states before going on")
@vary("stage", [1, 2])
def test_half_a_step(ranks, tmp_path, stage):
    """An engine would go on with parameters of which a step has changed a part, or stay locked behind a checkpoint."""
    case = Case(stage=stage, accumulation=3, groups=2)
    for after in ranks(2).run(half_a_step, case, str(tmp_path)):
        first, second = after.raised
        assert first == "behind the update"
        assert "was ended half way (Injected: behind the update)" in second
        assert after.error < BOUND
