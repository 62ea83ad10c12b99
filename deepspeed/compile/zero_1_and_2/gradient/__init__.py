# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The life of a gradient, from the native reducer to the views that the optimizer gets.

All ranks send gradients in one order, each in its turn. Of each gradient a rank gets its shard, which is bound: it
becomes a target, the averaged gradient of the shard, in the memory where it stays until the step.
``csrc/includes/deepcompile.h`` tells the whole life.
"""
