# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optional parts of the fork, each in a folder of its own.

The core imports none of them by name. A part is removed by deleting its folder and its name here. Three files are the
doors of a part, which has those that it needs:

- ``edits.py``: ``EDITS``, which ``setup.py`` makes in DeepSpeed's files after its own.
- ``options.py``: ``Options``, whose fields become options of the section ``compile`` (``config.py``). It must import
  nothing of DeepSpeed, because DeepSpeed reads its configuration before it can be imported.
- ``feature.py``: ``FEATURE``, a class of ``zero12/feature.py`` whose methods the core calls.
"""

NAMES = ("dora", "liger", "memory_picture", "monitoring", "progress", "report", "schedulers")
