# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gradients and new parameters of an optimizer that ``offload_optimizer`` puts on the host."""
