# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Logs what is being compiled, and the time that it took."""

# Parts without which this one does not work.
NEEDS = ("features.blocks",)
