# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The programs of ``examples/`` run under DeepSpeed's launcher, on two GPUs, in two processes on one, or on CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import shared_gpus
from support.pool import free_port, remove_buffers

pytestmark = pytest.mark.program("examples", "requirements/front_doors.txt")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# The packages that each needs besides transformers.
PROGRAMS = {
    "plain_loop.py": [],
    "float8_loop.py": ["torchao"],
    "hf_trainer.py": ["accelerate"],
    "accelerate_loop.py": ["accelerate"],
    "trl_lora.py": ["accelerate", "datasets", "peft", "trl"],
}


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


@pytest.mark.parametrize("program", PROGRAMS)
def test_trains(tmp_path, program):
    """A program would not run as it stands, need a download, or train without DeepCompile."""
    for package in ["transformers", *PROGRAMS[program]]:
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    gpus, port = torch.cuda.device_count(), free_port()
    # The launcher's argument --local_rank would tell of a GPU that is not there.
    shared = ["--no_local_rank", shared_gpus.__file__] if gpus == 1 else []
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)),
            *("--num_gpus" if gpus else "--num_accelerators", "2", *shared),
            *(str(EXAMPLES / program), "--tiny", "--epochs", "1", "--lr", "1e-2"),
        ],
        cwd=tmp_path,
        env={
            # As a person's shell has it.
            **{name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    remove_buffers(port)
    assert finished.returncode == 0, finished.stdout
    losses = [float(loss) for loss in re.findall(r"(?<!_)loss'?:? '?([\d.]+)", finished.stdout)]
    assert len(losses) >= 8 and losses[-1] < losses[0] - 0.2, finished.stdout
    counts = re.findall(r"(\d+) gradients came from compiled graphs", finished.stdout)
    # Accelerate prints on the first rank of each host. On one GPU all ranks have the local rank 0.
    assert len(counts) == (2 if shared and program == "accelerate_loop.py" else 1), finished.stdout
    assert all(int(count) > 0 for count in counts), finished.stdout
    assert "DeepCompile compiles parts of the model again" not in finished.stdout
