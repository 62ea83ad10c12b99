# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The old name of a package."""

raise ImportError("deepspeed.compile.features.shard_frozen is deepspeed.compile.features.shard_parameters now")
