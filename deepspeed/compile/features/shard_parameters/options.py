# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The options of this part."""

from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BaseModel, field_validator, model_validator

from ..blocks.options import WORKS_ON_BLOCKS


class Options(BaseModel):
    shard_parameters: Annotated[Optional[Literal["frozen", "all"]], WORKS_ON_BLOCKS] = None
    """Which parameters of the blocks each rank keeps only a part of, and gets the rest just before a block uses them:
    the frozen ones, as for LoRA of a model that does not fit, or all. Trained ones, and an embedding and a head, then
    lie in shards on the ranks, as in ZeRO-3, and steps are those of ZeRO-1/2. This needs regional compilation. Off by
    default, because all ranks must then evaluate together and read parameters alike. A rank that reads them by itself
    must do so in ``deepspeed.compile.features.shard_parameters.unsharded_parameters(engine)``."""

    keep_gathered: Union[int, Literal["fit"], None] = None
    """How many blocks stay whole from their forward to their backward, the last ones of the forward first, so that the
    backward need not gather them again. ``"fit"`` keeps, from the third step on, as many as fit into the memory that
    no rank needed in the first two. By default (null), none, and from 256 ranks on the last one of ``"all"``."""

    @field_validator("keep_gathered", mode="before")
    @classmethod
    def _is_a_number_of_blocks(cls, value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if value is not None and value != "fit" and not is_number:
            raise ValueError(
                f"compile.keep_gathered={value!r} is no number of blocks; set it to one, which may be 0, or to "
                '"fit", or leave it out'
            )
        return value

    @model_validator(mode="after")
    def _keeps_what_is_sharded(self):
        if self.keep_gathered is not None and not self.shard_parameters:
            raise ValueError(
                "compile.keep_gathered says how many of the blocks that compile.shard_parameters shards stay whole; "
                "set that too, or leave this out"
            )
        return self
