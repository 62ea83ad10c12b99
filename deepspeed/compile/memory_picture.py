# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Draws recorded steps. The public name of the command of ``tools/memory_picture``, which has the code.

::

    python -m deepspeed.compile.memory_picture A.json [B.json] [-o OUT]
"""

import sys

from .tools.memory_picture.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
