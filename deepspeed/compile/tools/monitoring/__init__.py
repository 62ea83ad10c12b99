# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Counters of gradients for DeepSpeed's monitors (``compile.monitor_memory``)."""
