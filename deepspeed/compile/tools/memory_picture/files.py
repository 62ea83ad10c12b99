# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a recorded step: the data, and pictures if a library can draw them."""

import importlib
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Dict, List

from .data import StepMemory

# Drawing library -> the module that draws with it, and the suffix of its pictures. Training needs neither library, so
# neither is a requirement of DeepSpeed.
LIBRARIES = {"matplotlib": ("draw_png", ".png"), "plotly": ("draw_html", ".html")}
REMEDY = "pip install matplotlib plotly"


def _drawers() -> Dict[str, ModuleType]:
    """Returns library -> the module that draws with it, for the libraries that can be imported."""
    found = {}
    for library, (module, _) in LIBRARIES.items():
        try:
            found[library] = importlib.import_module(f".{module}", __package__)
        except Exception:
            # A missing library raises ImportError. A library that does not fit the installed NumPy may raise any
            # error.
            continue
    return found


def missing_libraries() -> List[str]:
    """Lists the ``LIBRARIES`` that cannot be imported, because they are missing or broken."""
    drawers = _drawers()
    return [library for library in LIBRARIES if library not in drawers]


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
    """Draws a step beside its data, with the installed libraries; returns the pictures.

    Args:
        step: the step to draw.
        file: the file of its data.
    """
    drawn = []
    for library, drawer in _drawers().items():
        drawn.append(file.with_suffix(LIBRARIES[library][1]))
        drawer.draw(step, drawn[-1])
    return drawn


def draw_two(one: StepMemory, other: StepMemory, names: List[str], file: Path) -> List[Path]:
    """Draws two steps over each other, as ``file`` with the suffixes .png and .html; returns the pictures.

    Args:
        one, other: the steps.
        names: the steps' names in the picture.
        file: the path of the pictures.
    """
    drawn = []
    for library, drawer in _drawers().items():
        drawn.append(file.with_suffix(LIBRARIES[library][1]))
        drawer.draw_two(one, other, names, drawn[-1])
    return drawn
