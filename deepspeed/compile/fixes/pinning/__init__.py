# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes errors of pinned host memory say how much memory was missing, and which option helps.

To DeepSpeed: if ``offload_optimizer`` cannot pin memory, torch's error reads like one of GPU memory. Please name
``offload_optimizer.pin_memory`` and the size in it.
"""
