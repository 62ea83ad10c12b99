# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The lines of this fork in ``ds_report``."""

import os
import runpy
import subprocess
from pathlib import Path
from typing import Iterator, List, Tuple

import torch

from .tested_torch import TESTED, name_of, tested


def commit() -> str:
    """Returns the commit that is installed; of links to a checkout (``pip install -e``), its commit now."""
    import deepspeed

    if os.path.islink(__file__):
        command = ["git", "-C", os.path.dirname(os.path.realpath(__file__)), "rev-parse", "--short", "HEAD"]
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    return deepspeed.__git_hash__


def outdated() -> Iterator[str]:
    """Yields a sentence if the links to a checkout (``pip install -e``) are not those that it would get now."""
    import deepspeed

    if os.path.islink(__file__):
        # The checkout's own script says what makes links, and how that is told.
        checkout, linked = Path(__file__).resolve().parents[4], Path(deepspeed.__file__).parents[1]
        setup = runpy.run_path(str(checkout / "setup.py"))
        made = linked / setup["RECIPE"]
        if not made.is_file() or made.read_text() != setup["recipe"]():
            yield (
                "the checkout has other files, or edits DeepSpeed in another way, than at its installation; run "
                f"pip install --no-build-isolation -e {checkout}"
            )


def report() -> List[Tuple[str, str]]:
    """Returns (name, value) of each line that the fork adds to the report."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.dc import DeepCompileBuilder

    base = deepspeed.__version__.partition("+")[0]
    release = ".".join(torch.__version__.split(".")[:2])
    device = get_accelerator().device_name()
    was_tested = f"was {'' if release in TESTED.get(device, ()) else 'not '}tested on {name_of(device)}"
    builder = DeepCompileBuilder()
    if builder.is_built():
        built = f"built, for {device}"
    elif lacking := builder.lacking():
        built = f"cannot be built; this machine lacks {lacking}"
    else:
        built = "not built; the first training builds it, which may take a minute"
    return [
        *(("fork's links", sentence) for sentence in outdated()),
        ("fork", f"{deepspeed.__version__}, DeepSpeed {base} with another DeepCompile for ZeRO-1 and ZeRO-2"),
        ("fork's native code (dc)", built),
        ("fork's torch", f"tested with {tested()}; the installed {release} {was_tested}"),
    ]
