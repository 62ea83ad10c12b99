# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Will a model fit? The public name of ``tools/fits``, which has the code.

::

    python -m deepspeed.compile.fits --model Qwen/Qwen3-8B --gpus 8 --memory 80 --sequence 4096
"""

import sys

from .tools.fits.estimate import fits

__all__ = ["fits"]

if __name__ == "__main__":
    from .tools.fits.__main__ import main

    sys.exit(main())
