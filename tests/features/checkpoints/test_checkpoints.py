# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A ZeRO checkpoint is saved and loaded, also in the middle of a schedule and while parameters are gathered."""

import contextlib
import dataclasses
import time
from typing import Dict, List, NamedTuple

import pytest
import torch

from deepspeed.utils import safe_get_full_fp32_param

from support.checkpoints import (
    SCHEDULES,
    Compared,
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
from support.parameter_gather import DELAY, one_rank_late
from support.training import BOUND, relative_error


class Loaded(NamedTuple):
    """What an engine that loaded a checkpoint had, and what it trained on to."""

    differing: List[str]  # names of what differs after loading
    end: Compared  # against the engine that went on


class States(NamedTuple):
    """What an engine had at a checkpoint and later, by name: see ``state``."""

    at_checkpoint: Dict[str, torch.Tensor]  # behind what saved or loaded it
    later: Dict[str, torch.Tensor]  # two steps later


def train_and_save(run, folder, late=False):
    """Trains for four steps, saves right behind the last of them, and trains on for two; returns its states.

    ``late``: each rank in turn sends its parameters late, so that they are on their way when they are saved.
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
    return States(saved, later)


def load_and_train(run, folder, **options):
    """Loads into a new engine and trains on for two steps; returns its states."""
    _, engine = start(run, seed=1)
    engine.load_checkpoint(folder, tag="saved", **options)
    loaded = state(engine)
    train(engine, run, [4, 5])
    later = state(engine)
    engine.destroy()
    return States(loaded, later)


def save_and_load(run, folder, late=False, loaded_with=(True, False)):
    """Saves, and loads with DeepCompile and without.

    Returns a dict of :class:`Loaded`, by whether there was DeepCompile when it was loaded.
    """
    results = {}
    saved = train_and_save(run, folder, late)
    for deepcompile in loaded_with:
        loaded = load_and_train(dataclasses.replace(run, deepcompile=deepcompile), folder)
        results[deepcompile] = Loaded(
            differing(loaded.at_checkpoint, saved.at_checkpoint),
            compared(loaded.later, saved.later, saved.at_checkpoint),
        )
    return results


def assert_saved_and_loaded(results, dtype):
    for result in results:
        for loaded in result.values():
            assert loaded.differing == []
            assert_same(loaded.end, dtype)


@vary("model", ["FillsPartition", pytest.param("OneGraph", marks=pytest.mark.slow)])
@pytest.mark.parametrize("deepcompile", [True, False], ids=["saved-with", "saved-without"])
@vary("stage, dtype", [(1, "fp32"), (2, "bf16"), (2, "fp16")])
def test_saved_and_loaded(ranks, tmp_path, deepcompile, stage, dtype, model):
    """A state that a checkpoint lacks, of the schedule or the loss scale too, would begin anew."""
    # Two ranks add two numbers, so that all is bitwise the same even with DeepCompile and without.
    run = Run(model, stage=stage, dtype=dtype, deepcompile=deepcompile, schedule="WarmupDecayLR", groups=2)
    assert_saved_and_loaded(ranks(2).run(save_and_load, run, str(tmp_path)), dtype)


@vary("model", ["FillsPartition", pytest.param("OneGraph", marks=pytest.mark.slow)])
@pytest.mark.parametrize("deepcompile", [True, False], ids=["saved-with", "saved-without"])
@vary("stage, dtype", [(1, "bf16"), (2, "fp32"), (2, "fp16")])
def test_saved_and_loaded_with_offloading(ranks, tmp_path, deepcompile, stage, dtype, model):
    """States that are loaded onto the device, or gradients on the host from before the load, would step others."""
    run = Run(model, stage=stage, dtype=dtype, deepcompile=deepcompile, groups=2, offloaded=True)
    assert_saved_and_loaded(ranks(2).run(save_and_load, run, str(tmp_path)), dtype)


@vary("stage, dtype", [(1, "bf16"), (2, "fp32")])
def test_saved_while_parameters_are_on_their_way(ranks, tmp_path, stage, dtype):
    """A checkpoint that does not wait has the parameters from before the step."""
    run = Run(stage=stage, dtype=dtype, overlapped=True)
    results = ranks(2).run(save_and_load, run, str(tmp_path), late=True, loaded_with=[False])
    assert_saved_and_loaded(results, dtype)


@vary("stage", [1, 2])
def test_saved_and_loaded_with_weights_made_of_others(ranks, tmp_path, stage):
    """A weight that is made of two tensors would be saved without one of them."""
    run = Run(stage=stage, model="FrozenSubclass")
    assert_saved_and_loaded(ranks(1).run(save_and_load, run, str(tmp_path)), "fp32")


@pytest.mark.slow
def test_saved_and_loaded_with_generated_code(ranks, tmp_path):
    run = Run(stage=2, backend="inductor", model="RepeatedLayers")
    assert_saved_and_loaded(ranks(2).run(save_and_load, run, str(tmp_path), loaded_with=[True]), "fp32")


def roll_back(run, folder, late=False):
    """Saves, trains on, loads into the same engine what was saved, right behind a step, and trains the same again.

    ``late``: each rank in turn sends its parameters late, so that they are on their way when others are loaded.
    """
    _, engine = start(run)
    train(engine, run, range(4))
    engine.save_checkpoint(folder, tag="saved")
    saved = state(engine)
    train(engine, run, [4, 5])
    expected = state(engine)
    engine.load_checkpoint(folder, tag="saved")
    with one_rank_late(DELAY) if late else contextlib.nullcontext():
        train(engine, run, [4, 5])
        engine.load_checkpoint(folder, tag="saved")
    # Parameters that were still on their way would have arrived by now.
    time.sleep(2 * DELAY if late else 0)
    loaded = state(engine)
    train(engine, run, [4, 5])
    again = state(engine)
    engine.destroy()
    return Loaded(differing(loaded, saved), compared(again, expected, saved))


@vary("stage, dtype, overlapped", [(1, "fp32", True), (2, "bf16", True), (1, "bf16", False)])
def test_rolled_back(ranks, tmp_path, stage, dtype, overlapped):
    """Parameters that are still on their way when others are loaded would overwrite these."""
    run = Run(stage=stage, dtype=dtype, overlapped=overlapped)
    results = ranks(2).run(roll_back, run, str(tmp_path), late=overlapped)
    for result in results:
        assert result.differing == []
        assert_same(result.end, dtype)


def parameters_loaded(run, folder, states):
    """Loads parameters into an engine that has trained since, with ``states`` but not from saved master weights, or
    without. Returns how far parameters are off the saved ones, and master weights off the parameters."""
    module, engine = start(run)
    train(engine, run, range(2))
    engine.save_checkpoint(folder, tag="saved")
    with whole(engine, run):
        saved = [parameter.detach().clone() for parameter in module.parameters() if parameter.numel()]
    train(engine, run, [2, 3])
    engine.load_checkpoint(folder, tag="saved", load_optimizer_states=states)
    with whole(engine, run):
        loaded = [parameter for parameter in module.parameters() if parameter.numel()]
        masters = [safe_get_full_fp32_param(parameter) for parameter in loaded]
        errors = relative_error(loaded, saved), relative_error(masters, loaded)
    engine.destroy()
    return errors


@vary("form", [{"sharded": True, "dtype": "bf16"}, {"sharded": True}, {"overlapped": True, "dtype": "bf16"}])
@pytest.mark.parametrize("states", [True, False], ids=["with-states", "without-states"])
def test_parameters_alone(ranks, tmp_path, form, states):
    """Master weights that are made of the parameters from before the load would undo it in the next step."""
    run = Run("OddSizes", stage=2, config={"zero_optimization": {"load_from_fp32_weights": False}}, **form)
    assert ranks(2).run(parameters_loaded, run, str(tmp_path), states) == [(0.0, 0.0)] * 2


# Schedules ---------------------------------------------------------------------------------------------------------


class Scheduled(NamedTuple):
    """What training with a schedule of the learning rate came to."""

    error: float  # of the parameters
    rates: List[float]  # of the engines' steps
    expected: List[float]  # of the plain loop's


def train_with_schedule(run, folder):
    """Trains beside a plain loop with the same schedule, in an engine and then in one that loads what it saved."""
    module, engine = start(run)
    plain, rates, expected = Plain(run), [], []
    for number in range(10):
        if number == 5:
            engine.save_checkpoint(folder, tag="saved")
            engine.destroy()
            module, engine = start(run, seed=1)
            engine.load_checkpoint(folder, tag="saved")
        train(engine, run, [number])
        plain.train([number])
        rates.append(engine.get_lr()[0])
        expected.append(plain.optimizer.param_groups[0]["lr"])
    error = relative_error([safe_get_full_fp32_param(p) for p in module.parameters()], plain.module.parameters())
    engine.destroy()
    return Scheduled(error, rates, expected)


@vary("stage, schedule", [(1, "OneCycleLR"), *((2, schedule) for schedule in SCHEDULES)])
def test_schedules_of_the_learning_rate(ranks, tmp_path, stage, schedule):
    """A schedule that steps twice, or that a resumed engine begins anew, has other rates than a plain loop's."""
    run = Run("FillsPartition", stage=stage, schedule=schedule)
    for result in ranks(2).run(train_with_schedule, run, str(tmp_path)):
        assert result.rates == result.expected
        assert len(set(result.rates)) > 3
        assert result.error < BOUND
