# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optional parts that run without an engine, or beside one without changing it. ``../parts.py`` describes parts."""
