# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a recorded step: the data, and the pictures where there is something to draw them with."""

import importlib.util
import tempfile
from pathlib import Path
from typing import List

from .data import StepMemory

# What draws the pictures. Neither is needed to train, so neither is a requirement of DeepSpeed.
LIBRARIES = ("matplotlib", "plotly")
REMEDY = "pip install matplotlib plotly"


def missing_libraries() -> List[str]:
    """Returns which of ``LIBRARIES`` are not installed."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def make_folder(folder: Path) -> None:
    """Makes a folder, and tries whether files can be written there.

    Raises:
        OSError: if not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


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


def draw_step(step: StepMemory, file: Path) -> List[Path]:
    """Draws a step beside its data, with the libraries that are there; returns the pictures.

    Args:
        step: to draw.
        file: of its data.
    """
    missing, drawn = missing_libraries(), []
    if "matplotlib" not in missing:
        from . import draw_png

        drawn.append(file.with_suffix(".png"))
        draw_png.draw(step, drawn[-1])
    if "plotly" not in missing:
        from . import draw_html

        drawn.append(file.with_suffix(".html"))
        draw_html.draw(step, drawn[-1])
    return drawn


def draw_two(one: StepMemory, other: StepMemory, names: List[str], file: Path) -> List[Path]:
    """Draws two steps over each other, as ``file`` with the suffixes .png and .html; returns the pictures.

    Args:
        one, other: the steps.
        names: what to call them.
        file: where to.
    """
    missing, drawn = missing_libraries(), []
    if "matplotlib" not in missing:
        from . import draw_png

        drawn.append(file.with_suffix(".png"))
        draw_png.draw_two(one, other, names, drawn[-1])
    if "plotly" not in missing:
        from . import draw_html

        drawn.append(file.with_suffix(".html"))
        draw_html.draw_two(one, other, names, drawn[-1])
    return drawn
