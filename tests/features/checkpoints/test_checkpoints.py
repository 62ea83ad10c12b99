# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A ZeRO checkpoint is saved and loaded, also in the middle of a schedule and while parameters are gathered."""

import contextlib
import dataclasses
import time

import pytest

from deepspeed.utils import safe_get_full_fp32_param

from support.checkpoints import (
    SCHEDULES,
    Plain,
    Run,
    assert_same,
    compared,
    differing,
    start,
    state,
    train,
    whole,
)
from support.ids import vary
from support.on_ranks import on_ranks
from support.parameter_gather import DELAY, one_rank_late
from support.training import BOUND, relative_error


def check_saved_and_loaded(run, folder, late=False, loaded_with=(True, False)):
    """Saves right behind the last of four steps and trains on for two. An engine that loads that does the same two.

    Args:
        run: what to train.
        folder: for the checkpoint.
        late: whether each rank in turn sends its parameters late, so that they are on their way when they are saved.
        loaded_with: for each engine that loads, whether it has DeepCompile.
    """
    _, engine = start(run)
    train(engine, run, range(2))
    with one_rank_late(DELAY) if late else contextlib.nullcontext():
        train(engine, run, [2, 3])
        engine.save_checkpoint(folder, tag="saved")
    saved = state(engine)
    train(engine, run, [4, 5])
    later = state(engine)
    engine.destroy()
    for deepcompile in loaded_with:
        _, engine = start(dataclasses.replace(run, deepcompile=deepcompile), seed=1)
        engine.load_checkpoint(folder, tag="saved")
        assert differing(state(engine), saved) == []
        train(engine, run, [4, 5])
        assert_same(compared(state(engine), later, saved), run.dtype)
        engine.destroy()


@vary("model", ["FillsPartition", pytest.param("OneGraph", marks=pytest.mark.slow)])
@pytest.mark.parametrize("deepcompile", [True, False], ids=["saved-with", "saved-without"])
@vary("stage, dtype", [(1, "fp32"), (2, "bf16"), (2, "fp16")])
@on_ranks(2)
def test_saved_and_loaded(tmp_path, deepcompile, stage, dtype, model):
    """A state that a checkpoint lacks, of the schedule or the loss scale too, would begin anew."""
    # Two ranks add two numbers, so that all is bitwise the same even with DeepCompile and without.
    run = Run(model, stage=stage, dtype=dtype, deepcompile=deepcompile, schedule="WarmupDecayLR", groups=2)
    check_saved_and_loaded(run, tmp_path)


@vary("model", ["FillsPartition", pytest.param("OneGraph", marks=pytest.mark.slow)])
@pytest.mark.parametrize("deepcompile", [True, False], ids=["saved-with", "saved-without"])
@vary("stage, dtype", [(1, "bf16"), (2, "fp32"), (2, "fp16")])
@on_ranks(2)
def test_saved_and_loaded_with_offloading(tmp_path, deepcompile, stage, dtype, model):
    """States that are loaded onto the device, or gradients on the host from before the load, would step others."""
    run = Run(model, stage=stage, dtype=dtype, deepcompile=deepcompile, groups=2, offloaded=True)
    check_saved_and_loaded(run, tmp_path)


@vary("stage, dtype", [(1, "bf16"), (2, "fp32")])
@on_ranks(2)
def test_saved_while_parameters_are_on_their_way(tmp_path, stage, dtype):
    """A checkpoint that does not wait has the parameters from before the step."""
    run = Run(stage=stage, dtype=dtype, overlapped=True)
    check_saved_and_loaded(run, tmp_path, late=True, loaded_with=[False])


@vary("stage", [1, 2])
@on_ranks(1)
def test_saved_and_loaded_with_weights_made_of_others(tmp_path, stage):
    """A weight that is made of two tensors would be saved without one of them."""
    check_saved_and_loaded(Run(stage=stage, model="FrozenSubclass"), tmp_path)


@pytest.mark.slow
@on_ranks(2)
def test_saved_and_loaded_with_generated_code(tmp_path):
    run = Run(stage=2, backend="inductor", model="RepeatedLayers")
    check_saved_and_loaded(run, tmp_path, loaded_with=[True])


@vary("stage, dtype, overlapped", [(1, "fp32", True), (2, "bf16", True), (1, "bf16", False)])
@on_ranks(2)
def test_rolled_back(tmp_path, stage, dtype, overlapped):
    """Parameters that are still on their way when others are loaded would overwrite these."""
    run = Run(stage=stage, dtype=dtype, overlapped=overlapped)
    _, engine = start(run)
    train(engine, run, range(4))
    engine.save_checkpoint(tmp_path, tag="saved")
    saved = state(engine)
    train(engine, run, [4, 5])
    expected = state(engine)
    engine.load_checkpoint(tmp_path, tag="saved")
    # Each rank in turn sends its parameters late, so that they are on their way when others are loaded.
    with one_rank_late(DELAY) if overlapped else contextlib.nullcontext():
        train(engine, run, [4, 5])
        engine.load_checkpoint(tmp_path, tag="saved")
    # Parameters that were still on their way would have arrived by now.
    time.sleep(2 * DELAY if overlapped else 0)
    assert differing(state(engine), saved) == []
    train(engine, run, [4, 5])
    assert_same(compared(state(engine), expected, saved), dtype)
    engine.destroy()


@vary("form", [{"sharded": True, "dtype": "bf16"}, {"sharded": True}, {"overlapped": True, "dtype": "bf16"}])
@pytest.mark.parametrize("states", [True, False], ids=["with-states", "without-states"])
@on_ranks(2)
def test_parameters_alone(tmp_path, form, states):
    """Master weights that are made of the parameters from before the load would undo it in the next step."""
    run = Run("OddSizes", stage=2, config={"zero_optimization": {"load_from_fp32_weights": False}}, **form)
    module, engine = start(run)
    train(engine, run, range(2))
    engine.save_checkpoint(tmp_path, tag="saved")
    with whole(engine, run):
        saved = [parameter.detach().clone() for parameter in module.parameters() if parameter.numel()]
    train(engine, run, [2, 3])
    engine.load_checkpoint(tmp_path, tag="saved", load_optimizer_states=states)
    with whole(engine, run):
        loaded = [parameter for parameter in module.parameters() if parameter.numel()]
        masters = [safe_get_full_fp32_param(parameter) for parameter in loaded]
        assert relative_error(loaded, saved) == relative_error(masters, loaded) == 0
    engine.destroy()


# Schedules ---------------------------------------------------------------------------------------------------------


@vary("stage, schedule", [(1, "OneCycleLR"), *((2, schedule) for schedule in SCHEDULES)])
@on_ranks(2)
def test_schedules_of_the_learning_rate(tmp_path, stage, schedule):
    """A schedule that steps twice, or that a resumed engine begins anew, has other rates than a plain loop's."""
    run = Run("FillsPartition", stage=stage, schedule=schedule)
    module, engine = start(run)
    plain, rates, expected = Plain(run), [], []
    for number in range(10):
        if number == 5:
            engine.save_checkpoint(tmp_path, tag="saved")
            engine.destroy()
            module, engine = start(run, seed=1)
            engine.load_checkpoint(tmp_path, tag="saved")
        train(engine, run, [number])
        plain.train([number])
        rates.append(engine.get_lr()[0])
        expected.append(plain.optimizer.param_groups[0]["lr"])
    assert rates == expected and len(set(rates)) > 3
    masters = [safe_get_full_fp32_param(parameter) for parameter in module.parameters()]
    assert relative_error(masters, plain.module.parameters()) < BOUND
    engine.destroy()
