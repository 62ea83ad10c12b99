# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optional parts of the fork, each in a folder of its own.

The core imports none of them. A part is removed by deleting its folder and its name here. A part whose code DeepSpeed
must call has a file ``edits.py``, whose ``EDITS`` ``setup.py`` makes in DeepSpeed's files after its own.
"""

NAMES = ("memory_picture", "report", "schedulers")
