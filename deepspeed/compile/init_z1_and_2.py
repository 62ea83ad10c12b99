# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
# Name and signature of the function are those of the base's init_z1_and_2.py, which is
# Copyright (c) Microsoft Corporation.
# SPDX-License-Identifier: Apache-2.0
"""The entry of DeepCompile for ZeRO-1 and ZeRO-2, which the base's ``engine.compile()`` calls."""

from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

from .zero_1_and_2.engine.set_up import set_up

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from .config import CompileConfig


def init_z1_and_2(
    engine: "DeepSpeedEngine",
    backend: str,
    compile_config: "CompileConfig",
    compile_kwargs: Dict[str, Any],
    schedule: Optional[List],
    use_z2: bool = False,
) -> Callable:
    """Calls ``set_up()``, which prepares an engine and returns the backend that compiles its module."""
    # The base's engine passes its section `compile` and its stage too. set_up() asks the engine for both.
    return set_up(engine, backend, compile_kwargs, schedule)
