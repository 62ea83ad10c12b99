# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps those of Liger's kernels out of graphs that compiled code calls wrongly."""
