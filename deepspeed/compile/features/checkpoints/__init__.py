# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Saves and loads an optimizer in DeepSpeed's order of elements, and lets ``safe_get_full_*`` read and set them."""
