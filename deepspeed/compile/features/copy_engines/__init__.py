# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Carries gradients and parameters between the GPUs of one host by copy engines, which take no multiprocessors."""
