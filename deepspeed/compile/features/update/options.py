# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The options of this part."""

from typing import Literal, Optional

from pydantic import BaseModel


class Options(BaseModel):
    optimizer_states: Optional[Literal["8bit"]] = None
    """The format of Adam's two states. "8bit" takes one byte for each element, and a scale for each 256 elements. By
    default (null), the optimizer keeps states as it does without DeepCompile."""
    store_param_remainders: bool = False
    """Whether a rank keeps, in place of fp32 master weights, only the 16 bits that its bf16 parameters lack: 2 bytes
    for each element of its partition instead of 4."""
