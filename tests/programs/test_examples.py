# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The programs of ``examples/``, as the recipes of ``docs/recipes`` run them, under DeepSpeed's launcher.

They run on two GPUs, in two processes on one, or on CPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import shared_gpus
from support.programs import launch

pytestmark = pytest.mark.program("examples", "docs/recipes", "requirements/front_doors.txt")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# The packages that each needs besides transformers.
PROGRAMS = {
    "plain_loop.py": [],
    "finetune.py": [],
    "float8_loop.py": ["torchao"],
    "hf_trainer.py": ["accelerate"],
    "accelerate_loop.py": ["accelerate"],
    "trl_lora.py": ["accelerate", "datasets", "peft", "trl"],
    "trl_preferences.py": ["accelerate", "datasets", "trl"],
    "long_sequences.py": ["accelerate"],
}
ONE_EPOCH = "--epochs 1 --lr 1e-2"
# What runs: the programs, and then what the recipes of docs/recipes give them.
RUNS = {
    "plain_loop": f"plain_loop.py {ONE_EPOCH}",
    "float8_loop": f"float8_loop.py {ONE_EPOCH}",
    "hf_trainer": f"hf_trainer.py {ONE_EPOCH}",
    "accelerate_loop": f"accelerate_loop.py {ONE_EPOCH}",
    "trl_lora": f"trl_lora.py {ONE_EPOCH}",
    "lora_70b": f"trl_lora.py {ONE_EPOCH} --micro-batch 4 --shard",
    "pretraining": "finetune.py --lr 1e-2 --from-scratch --pack --length 128 --accumulation 2 --budget 0.5",
    "packing": "finetune.py --lr 1e-2 --pack --length 128 --micro-batch 1",
    "experts": "finetune.py --lr 1e-2 --experts --shard --remainders --checkpoint",
    "dpo": "trl_preferences.py --epochs 1 --lr 1e-2 --method dpo",
    "grpo": "trl_preferences.py --epochs 1 --lr 1e-3 --method grpo --micro-batch 4 --shard",
    "long_sequences": f"long_sequences.py {ONE_EPOCH}",
}
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
    """Runs a program with ``--tiny`` in two processes; returns what it printed."""
    program, *arguments = arguments.split()
    for package in ["transformers", *PROGRAMS[program]]:
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    gpus = torch.cuda.device_count()
    # The launcher's argument --local_rank would tell of a GPU that is not there.
    shared = ["--no_local_rank", shared_gpus.__file__] if gpus == 1 else []
    launcher = ("--num_gpus" if gpus else "--num_accelerators", 2, *shared)
    finished = launch([*launcher, EXAMPLES / program, "--tiny", *arguments], tmp_path, HF_HUB_OFFLINE="1")
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def losses_of(printed):
    return [float(loss) for loss in re.findall(r"(?<!_)loss'?:? '?([\d.]+)", printed)]


@pytest.mark.parametrize("name", RUNS)
def test_trains(tmp_path, name):
    """A program or a recipe would not run as it stands, need a download, or train without DeepCompile."""
    printed = run(tmp_path, RUNS[name])
    losses, least = losses_of(printed), LEAST.get(name, 0.2)
    assert len(losses) >= 8 and (least is None or losses[-1] < losses[0] - least), printed
    counts = re.findall(r"(\d+) gradients came from compiled graphs", printed)
    # Accelerate prints on the first rank of each host. On one GPU all ranks have the local rank 0.
    shared = torch.cuda.device_count() == 1
    assert len(counts) == (2 if shared and name == "accelerate_loop" else 1), printed
    assert all(int(count) > 0 for count in counts), printed
    assert "DeepCompile compiles parts of the model again" not in printed


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """The recipe of all parameters would resume with other weights or batches, or export what cannot be loaded."""
    arguments = "finetune.py --lr 1e-2 --steps 16 --checkpoint --shard --remainders --accumulation 2 --output run"
    whole = losses_of(run(tmp_path, f"{arguments} --save-every 8 --export"))
    (tmp_path / "run" / "latest").write_text("global_step8")
    printed = run(tmp_path, f"{arguments} --resume")
    assert "resumed after step 8\n" in printed
    assert len(whole) == 16 and losses_of(printed) == whole[8:]

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").num_parameters() > 0
