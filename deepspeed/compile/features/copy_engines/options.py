# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from typing import Optional

from pydantic import BaseModel


class Options(BaseModel):
    copy_engines: Optional[bool] = None
    """Whether the GPUs' copy engines carry gradients and parameters, rather than NCCL's kernels. All ranks must be on
    one host, and their GPUs must be able to read each other's memory. By default (null) wherever that is so. True is
    refused elsewhere."""
