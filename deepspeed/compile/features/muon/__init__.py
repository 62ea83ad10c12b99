# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Computes the updates of DeepSpeed's Muon, which need whole matrices. Other rules step them."""

# Parts without which this one does not work.
NEEDS = ("features.checkpoints",)
