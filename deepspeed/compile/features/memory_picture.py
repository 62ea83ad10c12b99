# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The former name of ``deepspeed.compile.memory_picture``, kept for one release."""

raise ImportError("deepspeed.compile.features.memory_picture is deepspeed.compile.memory_picture now")
