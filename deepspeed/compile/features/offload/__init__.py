# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Puts gradients into host memory where ``offload_optimizer`` puts the optimizer on the host."""
