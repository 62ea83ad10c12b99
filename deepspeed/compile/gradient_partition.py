# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Deprecated: import from ``deepspeed.compile.zero12``."""

import warnings

from .zero12 import gradient_counters, reset_gradient_counters

__all__ = ["gradient_counters", "reset_gradient_counters"]

warnings.warn(
    "deepspeed.compile.gradient_partition is deprecated; import from deepspeed.compile.zero12", DeprecationWarning, 2
)
