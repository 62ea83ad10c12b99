# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a part of the blocks' frozen parameters on each rank."""

# Parts without which this one does not work.
NEEDS = ("subclasses", "blocks")
