# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Writes the data of a recorded step, and finds what draws its picture."""

import importlib
from pathlib import Path
from typing import Any, Optional

from .data import StepMemory

# Training does not need matplotlib, so it is no requirement of DeepSpeed.
WITHOUT_LIBRARY = "matplotlib cannot be imported; pip install matplotlib"


def drawer() -> Optional[Any]:
    """Returns the module that draws, or None if matplotlib cannot be imported."""
    try:
        return importlib.import_module(".draw_png", __package__)
    except Exception:
        # A missing library raises ImportError. One that does not fit the installed NumPy may raise any error.
        return None


def write_step(step: StepMemory, folder: Path, name: str) -> Path:
    """Writes the data of a step under a name that is free in the folder; returns the file.

    Raises:
        OSError: if the file cannot be written.
    """
    number = 1
    while True:
        file = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            file.touch(exist_ok=False)
            break
        except FileExistsError:
            # An earlier run, or another engine of this process, has recorded there.
            number += 1
    step.write(file)
    return file
