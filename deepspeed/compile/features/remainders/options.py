# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from pydantic import BaseModel


class Options(BaseModel):
    store_param_remainders: bool = False
    """Whether a rank keeps the 16 bits that its bf16 parameters lack of their fp32 master weights, in place of the
    master weights: 2 bytes an element of its partition instead of 4."""
