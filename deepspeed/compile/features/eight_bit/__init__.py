# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps Adam's states in 8 bits."""

# Parts without which this one does not work.
NEEDS = ("one_pass_adam",)
