# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The programs of ``examples/``, as the recipes of ``docs/recipes`` show them, under DeepSpeed's launcher.

They run on two GPUs, in two processes on one, or on CPU. A recipe's commands with ``--tiny`` run as the page has them.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from support import shared_gpus
from support.documentation import ROOT, commands
from support.programs import launch

pytestmark = pytest.mark.program("examples", "docs/recipes", "requirements/front_doors.txt")

EXAMPLES = ROOT / "examples"
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
# The packages that each needs besides transformers.
PROGRAMS = {
    "plain_loop.py": [],
    "finetune.py": [],
    "float8_loop.py": ["torchao"],
    "hf_trainer.py": ["accelerate"],
    "accelerate_loop.py": ["accelerate"],
    "lightning_fit.py": ["lightning"],
    "trl_lora.py": ["accelerate", "datasets", "peft", "trl"],
    "trl_preferences.py": ["accelerate", "datasets", "trl"],
    "long_sequences.py": ["accelerate"],
}


def tiny_commands(recipe):
    """Lists the program and its arguments of each command of a recipe that has ``--tiny``."""
    shown = re.findall(r"(?ms)^```sh\n(.*?)^```", recipe.read_text())
    found = [words for block in shown for words in commands(block) if "--tiny" in words]
    starts = [next(place for place, word in enumerate(words) if word.startswith("examples/")) for words in found]
    return [" ".join(words[start:]).removeprefix("examples/") for words, start in zip(found, starts)]


OF_RECIPES = {recipe: tiny_commands(recipe) for recipe in RECIPES}
RUNS = [
    *(f"{program} --tiny" for program in ("plain_loop.py", "float8_loop.py", "hf_trainer.py", "accelerate_loop.py")),
    *("trl_lora.py --tiny", *dict.fromkeys(run for runs in OF_RECIPES.values() for run in runs)),
]
# What of a run's losses is expected to fall: losses of rewards need not.
LEAST = {"dpo": 0.05, "grpo": None}


@pytest.mark.parametrize("program", PROGRAMS)
def test_says_what_it_needs(tmp_path, program):
    """Who lacks a package would get a traceback from each rank, and have to guess which command installs it."""
    # The first that is imported; a further one would take the seconds in which the others are.
    package = [*PROGRAMS[program], "transformers"][0]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise ModuleNotFoundError('nothing', name={package!r})")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, str(EXAMPLES / program)], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, f"{package} is missing: pip install {package}\n")


def run(tmp_path, arguments):
    """Runs a program in two processes; returns what it printed."""
    program, *arguments = arguments.split()
    for package in ["transformers", *PROGRAMS[program]]:
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    gpus = torch.cuda.device_count()
    # The launcher's argument --local_rank would tell of a GPU that is not there.
    shared = ["--no_local_rank", shared_gpus.__file__] if gpus == 1 else []
    launcher = ("--num_gpus" if gpus else "--num_accelerators", 2, *shared)
    finished = launch([*launcher, EXAMPLES / program, *arguments], tmp_path, HF_HUB_OFFLINE="1")
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def losses_of(printed):
    return [float(loss) for loss in re.findall(r"(?<!_)loss'?:? '?([\d.]+)", printed)]


@pytest.mark.parametrize("arguments", RUNS)
def test_trains(tmp_path, arguments):
    """A program or a recipe would not run as it stands, need a download, or train without DeepCompile."""
    words = arguments.split()
    method = "grpo" if "grpo" in words else "dpo" if "dpo" in words else None
    # In a moment, and so fast that the losses show it.
    epochs = "" if words[0] == "finetune.py" else "--epochs 1"
    printed = run(tmp_path, f"{arguments} {epochs} --lr {'1e-3' if method == 'grpo' else '1e-2'}")
    losses, least = losses_of(printed), LEAST.get(method, 0.2)
    assert len(losses) >= 8 and (least is None or losses[-1] < losses[0] - least), printed
    counts = re.findall(r"(\d+) gradients came from compiled graphs", printed)
    # Accelerate prints on the first rank of each host. On one GPU all ranks have the local rank 0.
    shared = torch.cuda.device_count() == 1
    expected = 0 if "--off" in words else 2 if shared and words[0] == "accelerate_loop.py" else 1
    assert len(counts) == expected, printed
    assert all(int(count) > 0 for count in counts), printed
    assert "DeepCompile compiles parts of the model again" not in printed


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """The recipe of all parameters would resume with other weights or batches, or export what cannot be loaded."""
    arguments = "finetune.py --tiny --lr 1e-2 --checkpoint --shard --remainders --accumulation 2 --output run"
    whole = losses_of(run(tmp_path, f"{arguments} --save-every 8 --export"))
    (tmp_path / "run" / "latest").write_text("global_step8")
    printed = run(tmp_path, f"{arguments} --resume")
    assert "resumed after step 8\n" in printed
    assert len(whole) == 16 and losses_of(printed) == whole[8:]

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").num_parameters() > 0


@pytest.mark.slow
def test_packed_rows_train_alike_without_deepcompile(tmp_path):
    """Texts of a row would attend to each other where DeepCompile is off, or in an evaluation."""
    arguments = "finetune.py --tiny --pack --length 128 --steps 4 --evaluate-every 4"
    on, off = (run(tmp_path, f"{arguments} {more}") for more in ("", "--off"))
    evaluated = [re.findall(r"evaluated ([\d.]+)", printed) for printed in (on, off)]
    assert losses_of(on) == pytest.approx(losses_of(off), abs=2e-4) and len(losses_of(on)) == 4
    assert float(*evaluated[0]) == pytest.approx(float(*evaluated[1]), abs=2e-4)


@pytest.mark.quick
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_runs_and_says_where_its_figures_are_from(recipe):
    """A recipe would have no program that a test runs, or figures of which nobody knows whether they were measured."""
    assert OF_RECIPES[recipe] != []
    assert all(run.split()[0] in PROGRAMS for run in OF_RECIPES[recipe])
    assert re.search(r"\*\*(Measured|Computed|Not measured)\*\*", recipe.read_text())
