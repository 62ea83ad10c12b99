# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The life of a gradient, from the native reducer to the views that the optimizer gets.

All ranks send gradients in one order, each in its turn. What arrives at the rank that owns a range of a partition is
bound: it becomes a target, the averaged gradient of that range, in the memory where the owner keeps it until the step.
``csrc/includes/deepcompile.h`` tells the whole life.
"""
