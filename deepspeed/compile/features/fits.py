# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The former name of ``deepspeed.compile.fits``, kept for one release."""

raise ImportError("deepspeed.compile.features.fits is deepspeed.compile.fits now")
