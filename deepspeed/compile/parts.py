# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The optional parts of the fork, each a folder on one of three shelves.

- ``features/``: what changes how an engine trains.
- ``fixes/``: what mends DeepSpeed, transformers, peft or Liger. Each says what the upstream issue would say.
- ``tools/``: what runs without an engine, or beside one and only looks.

The core imports none of them by name. A part is removed by deleting its folder and its name here, and with it the
parts that name it in ``NEEDS``, in their ``__init__.py``. Three files are the doors of a part, which has those that it
needs:

- ``edits.py``: ``EDITS``, which ``setup.py`` makes in DeepSpeed's files after its own.
- ``options.py``: ``Options``, whose fields become options of the section ``compile`` (``config.py``). It must be light
  to import, because DeepSpeed reads its configuration before it makes an engine.
- ``feature.py``: ``FEATURE``, a class of ``zero_1_and_2/feature.py`` whose methods the core calls.
"""

import functools
import importlib
import importlib.util
from typing import Any, Tuple

# In the order in which an engine's parts are made and called: a part stands behind those that it needs.
NAMES = (
    "features.configuration",
    "fixes.timeouts",
    "fixes.schedulers",
    "fixes.subclasses",
    "tools.memory_picture",
    "fixes.dora",
    "fixes.liger",
    "fixes.experts",
    "features.activation_budget",
    "features.blocks",
    "fixes.key_value_cache",
    "tools.monitoring",
    "tools.progress",
    "features.overlap_gather",
    # What cuts a graph in pieces is called last, because the pieces stand in place of the graph.
    "features.loss",
    "features.shard_parameters",
    "features.update",
    "features.muon",
    "fixes.pinning",
    "tools.report",
    "tools.fits",
)


@functools.cache
def doors(file: str, name: str) -> Tuple[Any, ...]:
    """Lists what the parts that have a file of this name have in it by another name, in the order of the parts."""
    files = (f"{__package__}.{part}.{file}" for part in NAMES)
    return tuple(getattr(importlib.import_module(path), name) for path in files if importlib.util.find_spec(path))
