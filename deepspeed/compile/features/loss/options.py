# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from typing import Optional

from pydantic import BaseModel


class Options(BaseModel):
    chunked_loss: Optional[bool] = None
    """Whether the backward computes the gradient of a language model's logits in chunks, so that it never exists as a
    whole. By default (null), it does so from 2^30 logits on, where chunks save memory and cost little time."""
