# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from typing import Annotated, Optional

from pydantic import BaseModel

from ..blocks.options import WORKS_ON_BLOCKS


class Options(BaseModel):
    overlap_param_gather: Annotated[Optional[bool], WORKS_ON_BLOCKS] = None
    """Whether the next forward begins while updated parameters are still being gathered. Each block then waits for its
    own parameters, and code that reads or writes a parameter waits for it. By default (null), where blocks are graphs
    of their own (``regional_compilation``), unless ``shard_parameters`` is "all". True makes blocks graphs also where
    none were chosen without it."""
