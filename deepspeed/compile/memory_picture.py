# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The former name of ``deepspeed.compile.features.memory_picture``, kept for one release."""

raise ImportError(
    "deepspeed.compile.memory_picture has moved: import deepspeed.compile.features.memory_picture, and run "
    "`python -m deepspeed.compile.features.memory_picture`"
)
