# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Mends two functions of DeepSpeed's own DeepCompile for ZeRO-3, AutoSP and AutoTP."""
