# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from typing import Optional

from pydantic import BaseModel, Field

from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class MemoryPictureConfig(DeepSpeedConfigModel):
    """Which step's memory to draw, and where to. ``docs/guides/memory.md`` explains the pictures."""

    folder: str
    """The folder for the pictures and for the data. It is made if it does not exist."""

    step: int = Field(3, ge=1)
    """The number of the engine's step to record, counted from 1. With DeepCompile, the count begins when the engine is
    compiled. The first step compiles and the second may compile again, so the third is the first that is like all
    later steps."""


class Options(BaseModel):
    memory_picture: Optional[MemoryPictureConfig] = None
    """Records one step, and draws its memory: a PNG file, beside a file with the data. By default (null), nothing is
    recorded. The only option here that also works without ``deepcompile``, so that two pictures can be laid over each
    other."""
