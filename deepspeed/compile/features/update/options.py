# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The options of this part."""

from typing import Literal, Optional

from pydantic import BaseModel


class Options(BaseModel):
    optimizer_states: Optional[Literal["8bit"]] = None
    """The format of Adam's two states. "8bit" keeps them in a byte an element, with a scale for each 256 elements. By
    default (null), the optimizer keeps them as it does without DeepCompile."""
    store_param_remainders: bool = False
    """Whether a rank keeps the 16 bits that its bf16 parameters lack of their fp32 master weights, in place of the
    master weights: 2 bytes an element of its partition instead of 4."""
