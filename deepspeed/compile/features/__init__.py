# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optional parts of the fork, each in a folder of its own.

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
    "configuration",
    "unsupported_options",
    "self_compile",
    "timeouts",
    "report",
    "schedulers",
    "subclasses",
    "memory_picture",
    "dora",
    "liger",
    "monitoring",
    "guards",
    "activation_budget",
    "blocks",
    "key_value_cache",
    "progress",
    "overlap_gather",
    # What cuts a graph in pieces is called last, because the pieces stand in place of the graph.
    "loss",
    "shard_parameters",
    "update",
    "muon",
    "pinning",
    "fits",
)


@functools.cache
def doors(file: str, name: str) -> Tuple[Any, ...]:
    """Lists what the parts that have a file of this name have in it by another name, in the order of the parts."""
    files = (f"{__name__}.{part}.{file}" for part in NAMES)
    return tuple(getattr(importlib.import_module(path), name) for path in files if importlib.util.find_spec(path))
