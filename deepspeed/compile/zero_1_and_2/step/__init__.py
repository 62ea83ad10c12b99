# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The life of a step: norm, overflow, this rank's partitions, and the gather.

The first rule that serves a partition steps it, range by range.
"""
