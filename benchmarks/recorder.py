# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The recorder of ``compile.memory_picture``, from the checkout, whichever DeepSpeed is installed.

The base has no such module, and FSDP2 runs without DeepSpeed. So that all systems are measured by the same code, this
file loads the package by its place, under a name of its own. The modules of it that are used here import nothing of
DeepSpeed.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

PLACE = Path(__file__).resolve().parent.parent / "deepspeed" / "compile" / "tools" / "memory_picture"
NAME = f"{__package__}.memory_picture"


def _load():
    specification = importlib.util.spec_from_file_location(
        NAME, PLACE / "__init__.py", submodule_search_locations=[str(PLACE)]
    )
    package = importlib.util.module_from_spec(specification)
    sys.modules[NAME] = package
    specification.loader.exec_module(package)


if NAME not in sys.modules:
    _load()
data = importlib.import_module(f"{NAME}.data")
record = importlib.import_module(f"{NAME}.record")


def panel_drawer():
    """Returns the module that draws a panel; importing it needs matplotlib."""
    return importlib.import_module(f"{NAME}.draw_png")
