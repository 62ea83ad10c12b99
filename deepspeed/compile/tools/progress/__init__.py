# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Tells the user what is being compiled, and how long that took."""

# Parts without which this one does not work.
NEEDS = ("features.blocks",)
