# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's engine calls when it has read its configuration, in a line that ``edits.py`` adds to it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def refuse_stage_3(engine: "DeepSpeedEngine") -> None:
    """Called before anything is changed: ZeRO-3 partitions the module and changes the process.

    Raises:
        ValueError: if ZeRO-3 under DeepCompile has options that only ZeRO-1/2 have.
    """
    if engine.is_deepcompile_enabled() and engine.zero_optimization_stage() == 3:
        for name in engine._config.compile_config.set_for_zero_1_and_2():
            raise ValueError(
                f"compile.{name} goes with ZeRO-1 and ZeRO-2 only; leave it out, or set zero_optimization.stage to 1 "
                "or 2"
            )
