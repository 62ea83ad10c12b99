# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gives the loss of a language model a graph of its own, or computes it in chunks."""
