# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The optional parts of the fork, each a folder on one of three shelves.

- ``features/``: parts that change how an engine trains.
- ``fixes/``: parts that mend DeepSpeed, transformers, peft or Liger. Each fix is a file with the text of an upstream
  issue.
- ``tools/``: parts that run without an engine, or beside one without changing it.

The core imports none of them by name. To remove a part, delete its folder and its name here, and the parts that name
it in ``NEEDS``, in their ``__init__.py``. A part may have three doors:

- ``edits.py``: ``EDITS``, which ``setup.py`` makes in DeepSpeed's files after its own.
- ``options.py``: ``Options``, whose fields become options of the section ``compile`` (``config.py``). It must be light
  to import, because DeepSpeed reads its configuration before it makes an engine.
- ``feature.py``: ``FEATURE``, a class of ``zero_1_and_2/feature.py`` whose methods the core calls.
"""

import functools
import importlib
import importlib.util
from typing import Any, Tuple

# The parts in the order in which an engine makes and calls them: a part stands behind the parts that it needs.
NAMES = (
    "features.configuration",
    "fixes.base",
    "tools.memory_picture",
    "features.activation_budget",
    "features.checkpoints",
    "features.offload_optimizer",
    "features.blocks",
    "fixes.model_code",
    "tools.reports",
    "features.copy_engines",
    "features.overlap_gather",
    # Parts that cut a graph in pieces come late, because the pieces replace the graph.
    "features.loss",
    "features.shard_parameters",
    "features.update",
    "tools.fits",
)


@functools.cache
def doors(file: str, name: str) -> Tuple[Any, ...]:
    """Lists the object ``name`` of each part's file ``file``, in the order of the parts that have the file."""
    files = (f"{__package__}.{part}.{file}" for part in NAMES)
    return tuple(getattr(importlib.import_module(path), name) for path in files if importlib.util.find_spec(path))
