# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Accelerate, Trainer, Lightning and TRL train under DeepCompile with nothing but its line in the configuration."""

import pytest

from support import front_doors
from support.front_doors import HALF, STEPS, Case

# Relative, of losses in fp32.
BOUND = 1e-5


def packages(door):
    """The packages that a door needs, as names of modules."""
    if door == "Lightning":
        return "transformers", "lightning"
    trainer = ("transformers", "accelerate")
    return (*trainer, "trl", "peft", "datasets") if "SFT" in door or "DPO" in door else trainer


@pytest.mark.parametrize(
    "door, stage, backend",
    [
        ("Accelerate", 1, "eager"),
        ("Accelerate", 2, "eager"),
        ("Accelerate with dynamo", 1, "eager"),
        ("Accelerate with regions", 1, "eager"),
        # As a person has it who sets nothing else.
        ("Trainer", 1, "inductor"),
        ("Trainer with torch_compile", 1, "eager"),
        ("Lightning", 2, "eager"),
        ("SFTTrainer", 1, "eager"),
        ("SFTTrainer with LoRA", 2, "eager"),
        ("DPOTrainer", 1, "eager"),
    ],
)
def test_trains_with_the_line_in_the_configuration(ranks, tmp_path, door, stage, backend):
    for package in packages(door):
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    case = Case(door, str(tmp_path), stage, backend)
    results = ranks(2).run(front_doors.off_on_resumed, case)
    for off, on, resumed in results:
        assert len(on.losses) == STEPS and len(on.evaluations) == 2
        assert on.losses == pytest.approx(off.losses, rel=BOUND)
        assert on.evaluations == pytest.approx(off.evaluations, rel=BOUND)
        assert on.losses[-1] < on.losses[0] - 0.05, "the model hardly learned, so agreement shows nothing"

        assert resumed.losses == pytest.approx(on.losses[HALF:], rel=BOUND)
        assert resumed.evaluations == pytest.approx(on.evaluations[1:], rel=BOUND)

        for record, steps in ((on, STEPS), (resumed, STEPS - HALF)):
            assert record.counters["from_graphs"] >= steps * record.trained_in_blocks > 0
            # The embedding and the last norm: what calls the layers is not compiled.
            assert record.counters["from_autograd"] == steps * (record.trained - record.trained_in_blocks)
        # The reference model of DPO is an engine that DeepCompile leaves alone.
        assert on.others_compiled == ([False] if door == "DPOTrainer" else [])

    told = [message for record in results[0] for message in record.warnings]
    if door == "Accelerate with regions":
        assert len(told) == 2 and all("compiled before" in message for message in told), told
    else:
        assert not told
