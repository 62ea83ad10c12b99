# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Deprecated: import from ``deepspeed.compile.zero12``."""

import warnings

from .zero12 import wait_for_parameters

__all__ = ["wait_for_parameters"]

warnings.warn(
    "deepspeed.compile.parameter_gather is deprecated; import from deepspeed.compile.zero12", DeprecationWarning, 2
)
