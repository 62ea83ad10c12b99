# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The faults of ``make faults`` can be planted, and ranks import the package in which they are planted."""

import importlib.resources
import os
from pathlib import Path

import pytest

import deepspeed

from support.planted import FAULTS
from support.pool import TESTS

PACKAGE = Path(deepspeed.__file__).parent


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_planted(name):
    """A fault whose text is gone from the code would not be planted any more, and nobody would miss it."""
    fault = FAULTS[name]
    assert fault.broken(PACKAGE) != (PACKAGE / fault.file).read_text()
    assert [file for file in fault.tests if not (TESTS / file).is_file()] == []


def test_ranks_import_the_package_that_pytest_imports(ranks):
    """Ranks would import the installed package, and not the copy in which a fault is planted."""
    assert ranks(2).run(importlib.resources.files, "deepspeed") == [PACKAGE, PACKAGE]
    searched_first = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    named = [Path(folder, "deepspeed") for folder in searched_first if Path(folder, "deepspeed").is_dir()]
    assert named[:1] in ([], [PACKAGE])
