# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The old name of a package."""

raise ImportError(
    "deepspeed.compile.zero12 is deepspeed.compile.zero_1_and_2 now, and its gathered_parameters() is "
    "unsharded_parameters() of deepspeed.compile.features.shard_parameters"
)
