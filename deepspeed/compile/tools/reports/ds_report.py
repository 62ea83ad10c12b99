# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The lines of this fork in ``ds_report``."""

from typing import List, Tuple

import torch

# The releases of torch with which tests were run: 2.11 on GPUs, 2.13 on CPU. docs/internals/verification.md says which
# tests.
NEWEST_ON_GPUS = "2.11"
TESTED_TORCH = (NEWEST_ON_GPUS, "2.13")


def report() -> List[Tuple[str, str]]:
    """Returns (name, value) of each line that the fork adds to the report."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.dc import DeepCompileBuilder

    base = deepspeed.__version__.partition("+")[0]
    release = ".".join(torch.__version__.split(".")[:2])
    tested = "one of those" if release in TESTED_TORCH else "none of those"
    builder = DeepCompileBuilder()
    if builder.is_built():
        built = f"built, for {get_accelerator().device_name()}"
    elif lacking := builder.lacking():
        built = f"cannot be built; this machine lacks {lacking}"
    else:
        built = "not built; the first training builds it, which may take a minute"
    return [
        ("fork", f"{deepspeed.__version__}, DeepSpeed {base} with another DeepCompile for ZeRO-1 and ZeRO-2"),
        ("fork's native code (dc)", built),
        ("fork's torch", f"tested with {', '.join(TESTED_TORCH)}; the installed {release} is {tested}"),
    ]
