# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Copy engines where they can serve, and what says so elsewhere. The rest needs GPUs: see ``carry.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed.compile.features.copy_engines.possible import why_impossible

PROGRAM = Path(__file__).with_name("carry.py")


@pytest.mark.options("compile.copy_engines")
def test_hosts_are_told_apart_by_the_launcher(monkeypatch):
    """Without this, ranks of several hosts could try to map each other's memory, and hang in that."""
    import deepspeed.compile.features.copy_engines.possible as possible

    class Cuda:
        def device_name(self):
            return "cuda"

    monkeypatch.setattr(possible, "get_accelerator", Cuda)
    for local, world, begins in (("8", 16, "ranks are on several"), ("8", 8, ""), ("", 8, ""), ("1", 1, "a single")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert why_impossible(world).startswith(begins) and bool(why_impossible(world)) == bool(begins)


@pytest.mark.slow
@pytest.mark.options("compile.copy_engines")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ranks", [2, 4], ids=str)
def test_ranks_that_share_a_gpu(ranks):
    """Without this, copied bytes could be wrong or late, memory could exceed what is stated, and ranks could hang."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        str(PROGRAM),
        # Other tests may run beside this one.
        "--shared",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ.copy())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
