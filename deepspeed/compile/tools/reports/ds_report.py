# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The lines of this fork in ``ds_report``."""

from typing import List, Tuple

import torch

from .tested_torch import TESTED, name_of, tested


def report() -> List[Tuple[str, str]]:
    """Returns (name, value) of each line that the fork adds to the report."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.dc import DeepCompileBuilder

    base = deepspeed.__version__.partition("+")[0]
    release = ".".join(torch.__version__.split(".")[:2])
    device = get_accelerator().device_name()
    was_tested = f"was {'' if release in TESTED.get(device, ()) else 'not '}tested on {name_of(device)}"
    builder = DeepCompileBuilder()
    if builder.is_built():
        built = f"built, for {device}"
    elif lacking := builder.lacking():
        built = f"cannot be built; this machine lacks {lacking}"
    else:
        built = "not built; the first training builds it, which may take a minute"
    return [
        ("fork", f"{deepspeed.__version__}, DeepSpeed {base} with another DeepCompile for ZeRO-1 and ZeRO-2"),
        ("fork's native code (dc)", built),
        ("fork's torch", f"tested with {tested()}; the installed {release} {was_tested}"),
    ]
