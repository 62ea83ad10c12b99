# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from pydantic import BaseModel, model_validator


class Options(BaseModel):
    overlap_param_gather: bool = False
    """Whether the next forward begins while updated parameters are still being gathered. Each block then waits for its
    own parameters, so this option needs regional compilation. Off by default, because code that reads a parameter
    between a step and the next forward must first call
    ``deepspeed.compile.zero_1_and_2.wait_for_parameters(engine)``."""

    @model_validator(mode="after")
    def _gathers_by_block(self):
        if self.overlap_param_gather and getattr(self, "regional_compilation", None) is False:
            raise ValueError(
                "compile.overlap_param_gather needs blocks that wait for their parameters; set "
                "compile.regional_compilation to true, or leave one of them out"
            )
        return self
