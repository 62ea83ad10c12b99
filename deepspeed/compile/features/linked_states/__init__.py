# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Mends what DeepSpeed links parameters with for ``safe_get_full_optimizer_state()``, and moves of states."""
