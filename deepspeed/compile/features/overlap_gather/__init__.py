# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gathers updated parameters while the next forward begins."""

# Parts without which this one does not work.
NEEDS = ("features.blocks",)
