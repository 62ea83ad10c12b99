# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Deprecated: import from ``deepspeed.compile.zero12``."""

from .zero12 import gradient_counters, reset_gradient_counters

__all__ = ["gradient_counters", "reset_gradient_counters"]
