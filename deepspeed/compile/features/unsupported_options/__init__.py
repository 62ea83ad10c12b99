# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Refuses options of DeepSpeed that ZeRO-1 and ZeRO-2 under DeepCompile cannot honour, and warns of ignored ones."""
