# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Programs that tests start as a person starts them in a shell."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

from support.pool import free_port, remove_buffers

# Variables with which programs train on CPU.
ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def run_program(command: Sequence[Any], folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command in a folder, and returns it when it has ended. ``stdout`` has all that it printed.

    ``folder`` must not be the checkout's own: Python would look for modules in its deepspeed/, which is not the whole
    package.
    """
    # With this variable, Python does not find what lies beside a script.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(command: Sequence[Any], folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Does the same under DeepSpeed's launcher. ``command``: the launcher's arguments, the program and its own."""
    # As a module: where packages were installed into a folder of their own, the script is not beside the interpreter.
    port = free_port()
    launcher = (sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", port)
    finished = run_program([*launcher, *command], folder, **variables)
    remove_buffers(port)
    return finished
