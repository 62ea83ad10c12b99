# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from typing import ClassVar, Literal, Optional

from pydantic import BaseModel, model_validator


class Options(BaseModel):
    # Whether a forward may need what only a compiled engine has: here, parameters that are still on the host.
    NEED_EVERY_FORWARD: ClassVar[bool] = True

    shard_frozen: bool = False
    """Whether each rank keeps only a part of the blocks' frozen parameters, and gets the rest just before a block uses
    them, as for LoRA of a model that does not fit. This needs regional compilation. Off by default, because all ranks
    must then evaluate together, and read frozen parameters only in
    ``deepspeed.compile.features.shard_frozen.unsharded_parameters(engine)``."""

    shard_parameters: Optional[Literal["frozen", "all"]] = None

    @model_validator(mode="after")
    def _shards_blocks(self):
        if self.shard_frozen and getattr(self, "regional_compilation", None) is False:
            raise ValueError(
                "compile.shard_frozen needs blocks whose parameters are gathered; set compile.regional_compilation to "
                "true, or leave one of them out"
            )
        return self
