# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The package of benchmarks, from the checkout."""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Callable, Iterator

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@contextlib.contextmanager
def benchmarks() -> Iterator[Callable[[str], ModuleType]]:
    """Imports the package while the context lasts. Its value, called with a name, imports a module of the package.

    The checkout does not come into this process's sys.path, where its folder deepspeed/ could hide the installed one.
    """
    file, search = BENCHMARKS / "__init__.py", [str(BENCHMARKS)]
    spec = importlib.util.spec_from_file_location("benchmarks", file, submodule_search_locations=search)
    sys.modules["benchmarks"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
