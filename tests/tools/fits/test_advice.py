# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the command that asks whether a model fits advises."""

import dataclasses

import pytest
from torch import nn

from deepspeed.compile.fits import fits
from deepspeed.compile.tools.fits import estimate
from deepspeed.compile.tools.fits.advice import COLUMNS, FEW, few_rows, recommended, text_of
from deepspeed.compile.tools.fits.estimate import GIB
from deepspeed.compile.tools.fits.modes import MODES, Mode

from support.models import Stack

WIDTH = 8192


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.linear(x).relu()


class Large(Stack):
    """Has 2.7 billion parameters in layers, and few outside of them."""

    def __init__(self):
        super().__init__(Layer, 40, WIDTH, vocabulary=16)

    def forward(self, ids):
        return super().forward(ids).square().mean()


@pytest.fixture(scope="module")
def answer():
    """The answer without modes that change activations, each of which takes a trace of the model."""
    modes = [mode for mode in MODES if mode.of_activations[:3] == (False, None, None) and mode.system == "fork"]
    return fits(Large, modes=[*modes, Mode("FSDP2, resharded", 1.2, "fsdp2", reshard=True)], gpus=8, sequence=64)


def on(answer, memory):
    """Returns the answer for GPUs of so many GB, without another estimate."""
    return answer._replace(question=dataclasses.replace(answer.question, memory=memory))


def test_the_fastest_mode_with_the_fewest_options(answer):
    """Who has room would be told to change more than is needed, and who has none to take a slow mode."""
    assert recommended(on(answer, 80)).mode.name == "ZeRO-1 or 2"
    # Where ZeRO-1 fits no longer, and only sharded parameters do.
    sharded = recommended(on(answer, 8))
    assert sharded.mode.shard_parameters == "all" and not sharded.mode.offload
    faster = [row for row in answer.rows if row.mode.system == "fork" and row.mode.pace < sharded.mode.pace]
    assert faster and all(on(answer, 8).verdict(row) in ("no", "tight") for row in faster)


@pytest.mark.follows("--all shows modes without them")
@pytest.mark.parametrize("memory", [80, 8, 3.5])
def test_what_is_printed_is_short(answer, memory):
    """A terminal would break the lines of the table, or a person look for one mode among two dozen."""
    lines = text_of(on(answer, memory), "large", shows_all=False)
    assert max(map(len, lines)) <= COLUMNS
    rows = few_rows(on(answer, memory))
    assert len(rows) <= FEW and "FSDP2, resharded" in {row.mode.name.partition(", checkpointed")[0] for row in rows}
    assert any(line.startswith("Recommended: ") or line.startswith("Nothing fits") for line in lines)
    every = text_of(on(answer, memory), "large", shows_all=True)
    assert all(any(line.startswith(row.mode.name) for line in every) for row in answer.rows)


@pytest.mark.slow
def test_from_how_many_gpus_on(answer, monkeypatch):
    """Who has too few GPUs would try numbers by hand, or believe that more of them help where none do."""
    answer = fits(Large, gpus=1, memory=6, sequence=64)
    gpus, row = answer.enough
    assert gpus == 8 and row.peak / GIB < 6
    text = " ".join(text_of(answer, "large", shows_all=False))
    assert f"Nothing fits on 1 GPU of 6 GB. On 8, {row.mode.name} fits." in text
    text = " ".join(text_of(answer._replace(enough=None), "large", shows_all=False))
    assert "Nor does anything on up to 256: take shorter sequences, or GPUs with more memory." in text
    # Those that were asked for may be more than are tried at first.
    many = answer._replace(enough=None, question=dataclasses.replace(answer.question, gpus=160))
    assert "Nor does anything on up to 1280: " in " ".join(text_of(many, "large", shows_all=False))
    monkeypatch.setattr(estimate, "MOST_GPUS", 1)
    assert fits(Large, gpus=1, memory=6, sequence=64).enough == (gpus, row)
