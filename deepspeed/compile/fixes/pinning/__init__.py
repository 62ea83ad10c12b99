# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Says in an error of pinned host memory how much could not be had, and which option helps.

To DeepSpeed: where ``offload_optimizer`` cannot pin memory, torch's error reads like one of the GPU's memory. Please
name ``offload_optimizer.pin_memory`` and the size in it.
"""
