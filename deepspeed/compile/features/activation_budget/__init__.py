# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a part of the activations that a backward needs, and computes the rest again."""
