# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an engine holds can be saved, loaded, exported, moved away and back, read and set."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from support import checkpoints
from support.checkpoints import SCHEDULES, SETTERS, Run

BOUND = 1e-5
# What one rounding of the format makes of the distance that parameters have moved.
ROUNDING = {"fp32": BOUND, "bf16": 2**-8, "fp16": 2**-11}
# On CPU the same steps give the same bits; on GPUs some kernels add in any order.
EXACT = not torch.cuda.is_available()


def assert_same(differing, error, moved, dtype):
    """That two trainings came to the same: bitwise where they can, else but for rounding."""
    assert moved > 1e-2, "the last steps changed little, so agreement shows nothing"
    assert error < ROUNDING[dtype] * moved
    if EXACT:
        assert differing == []


# ZeRO checkpoints -----------------------------------------------------------------------------------------------


def assert_saved_and_loaded(results, dtype):
    for result in results:
        for deepcompile in (True, False):
            after_loading, at_the_end, error = result[deepcompile]
            assert after_loading == []
            assert_same(at_the_end, error, result["moved"], dtype)


@pytest.mark.parametrize("stage, dtype", [(1, "fp32"), (2, "bf16"), (2, "fp16")])
@pytest.mark.parametrize("deepcompile", [True, False], ids=["saved with", "saved without"])
def test_saved_and_loaded(ranks, tmp_path, deepcompile, stage, dtype):
    # Two ranks add two numbers, so that all is bitwise the same even with DeepCompile and without.
    run = Run(stage=stage, dtype=dtype, deepcompile=deepcompile, schedule="WarmupDecayLR", groups=2)
    assert_saved_and_loaded(ranks(2).run(checkpoints.save_and_load, run, str(tmp_path)), dtype)


@pytest.mark.parametrize("stage, dtype", [(1, "bf16"), (2, "fp32")])
def test_saved_while_parameters_are_on_their_way(ranks, tmp_path, stage, dtype):
    run = Run(stage=stage, dtype=dtype, overlapped=True)
    results = ranks(2).run(checkpoints.save_and_load, run, str(tmp_path), late=True)
    assert_saved_and_loaded(results, dtype)


def test_saved_and_loaded_with_generated_code(ranks, tmp_path):
    run = Run(stage=2, backend="inductor", model="RepeatedLayers")
    for result in ranks(2).run(checkpoints.save_and_load, run, str(tmp_path)):
        after_loading, at_the_end, error = result[True]
        assert after_loading == []
        assert_same(at_the_end, error, result["moved"], "fp32")


@pytest.mark.parametrize("stage, dtype, overlapped", [(1, "fp32", True), (2, "bf16", True), (1, "bf16", False)])
def test_rolled_back(ranks, tmp_path, stage, dtype, overlapped):
    run = Run(stage=stage, dtype=dtype, overlapped=overlapped)
    results = ranks(2).run(checkpoints.roll_back, run, str(tmp_path), late=overlapped)
    for after_loading, at_the_end, error, moved in results:
        assert after_loading == []
        assert_same(at_the_end, error, moved, dtype)


@pytest.mark.parametrize(
    "run",
    [
        Run(stage=2, dtype="bf16", accumulation=1),
        # Fewer parameters, which is quicker.
        Run(stage=1, dtype="fp32", accumulation=3, model="FillsPartition"),
    ],
    ids=lambda run: f"stage {run.stage}-{run.dtype}",
)
def test_200_steps_stopped_and_resumed(ranks, tmp_path, run):
    run = dataclasses.replace(run, schedule="OneCycleLR", vary_length=True)
    results = ranks(2).run(checkpoints.stop_and_resume, run, str(tmp_path), steps=200, stop=170)
    for at_the_end, error, moved, beside_plain in results:
        assert_same(at_the_end, error, moved, run.dtype)
        assert beside_plain is None or beside_plain < BOUND


# Another number of ranks ----------------------------------------------------------------------------------------

# How many ranks save, and what; each is loaded by as many as the others have.
SAVED = [
    (2, Run(stage=1, dtype="fp32")),
    (2, Run(stage=2, dtype="bf16", deepcompile=False)),
    (3, Run(stage=1, dtype="bf16")),
    (3, Run(stage=2, dtype="fp32")),
]
CONVERT = """
import sys
from deepspeed.checkpoint import ds_to_universal
for folder in sys.argv[1:]:
    arguments = ["--input_folder", folder + "/saved", "--output_folder", folder + "/universal"]
    arguments += ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    sys.argv = ["ds_to_universal.py", *arguments]
    ds_to_universal.main(ds_to_universal.parse_arguments())
"""


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Returns the folder of each of SAVED, with the checkpoint as it was saved and the universal one made from it."""
    folders = [str(tmp_path_factory.mktemp(f"saved by {world} ")) for world, _ in SAVED]
    for (world, run), folder in zip(SAVED, folders, strict=True):
        ranks(world).run(checkpoints.save_for_other_ranks, run, folder)
    # As one process: most of the time goes into starting it.
    subprocess.run([sys.executable, "-c", CONVERT, *folders], check=True, capture_output=True, timeout=240)
    return folders


@pytest.mark.parametrize("deepcompile", [True, False], ids=["loaded with", "loaded without"])
# In this order the processes of three ranks start once.
@pytest.mark.parametrize("index", range(len(SAVED)), ids=lambda index: f"saved by {SAVED[index][0]}-{index}")
def test_another_number_of_ranks(saved, ranks, index, deepcompile):
    before, run = SAVED[index]
    run, folder = dataclasses.replace(run, deepcompile=deepcompile), saved[index]
    for after_loading, error, moved in ranks(5 - before).run(checkpoints.load_universal, run, folder):
        assert after_loading == []
        assert moved > 1e-2
        assert error < ROUNDING[run.dtype] * moved
    for parameters, masters, error, moved in ranks(5 - before).run(checkpoints.load_module_only, run, folder):
        assert parameters == masters == 0
        assert moved > 1e-2
        # The plain loop computes in fp32.
        assert error < BOUND * moved or run.dtype != "fp32"


# Exports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        Run(stage=1, dtype="bf16", groups=3, overlapped=True),
        Run(stage=2, dtype="bf16", model="FrozenAndUnused"),
        Run(stage=2, dtype="fp32", model="OddSizes", groups=2),
        Run(stage=2, dtype="fp16", model="TiedEmbedding", overlapped=True),
    ],
    ids=lambda run: run.model,
)
def test_exported(ranks, tmp_path, run):
    for differing in ranks(2).run(checkpoints.export, run, str(tmp_path), late=run.overlapped):
        assert differing == {"16 bits": [], "state dict": [], "fp32": []}


# States moved away and back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["between steps", "between micro-batches", "between backward and step"])
@pytest.mark.parametrize("stage, dtype, overlapped", [(1, "bf16", False), (2, "fp32", True)])
def test_states_moved_away_and_back(ranks, stage, dtype, overlapped, moment):
    run = Run(stage=stage, dtype=dtype, overlapped=overlapped, steps=4)
    for differing, error, moved, places in ranks(2).run(checkpoints.train_with_states_moved, run, moment):
        assert places > 1, "parameters stayed where they were"
        assert_same(differing, error, moved, dtype)


# Reading and setting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [Run(stage=1, clipping=0.1), Run(stage=2, optimizer="SGD", overlapped=True)],
    ids=["AdamW", "SGD, overlapped"],
)
@pytest.mark.parametrize(
    "setter, moment",
    [
        *((setter, "between backward and step") for setter in SETTERS),
        *((setter, "between steps") for setter in ("set_masters", "set_optimizer_states")),
    ],
)
def test_read_and_set_as_in_a_plain_loop(ranks, setter, moment, run):
    for errors, moved in ranks(2).run(checkpoints.set_beside_plain_loop, run, setter, moment):
        assert moved > 1e-3, "what was set made no difference"
        assert max(errors.values()) < BOUND, errors


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_takes_all_that_was_set(ranks, dtype, stage):
    run = Run(stage=stage, dtype=dtype, clipping=0.1, schedule="OneCycleLR")
    for masters, states, stale in ranks(2).run(checkpoints.set_all_between_backward_and_step, run):
        assert masters < BOUND and states < BOUND
        assert stale == []


# Schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, schedule", [(1, "OneCycleLR"), *((2, schedule) for schedule in SCHEDULES)])
def test_schedules_of_the_learning_rate(ranks, tmp_path, stage, schedule):
    run = Run(stage=stage, schedule=schedule)
    for error, rates, expected in ranks(2).run(checkpoints.train_with_schedule, run, str(tmp_path)):
        assert rates == expected
        assert len(set(rates)) > 3
        assert error < BOUND
