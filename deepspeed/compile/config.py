# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The section ``compile`` of ``ds_config``: the base's options, and those of this fork's optional parts.

``docs/reference/options.md`` describes each option under ZeRO-1 and ZeRO-2. In these stages, an engine with
``deepcompile`` compiles itself before its first training forward.
"""

from typing import Literal, Optional

from .config_base import CompileConfig as BaseCompileConfig
from .parts import doors


class CompileConfig(*doors("options", "Options"), BaseCompileConfig):  # type: ignore[misc]
    """Settings of ``engine.compile()``."""

    @property
    def sharded(self) -> Optional[Literal["frozen", "all"]]:
        """Which parameters each rank keeps only a part of. Parts ask for it that work without the part that shards."""
        return getattr(self, "shard_parameters", None)
