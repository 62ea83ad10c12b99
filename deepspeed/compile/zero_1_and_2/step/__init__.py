# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The life of a step: norm, overflow, this rank's partitions, and the gather.

A partition is stepped range by range, by the first rule that serves it.
"""
