# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optional parts that run without an engine, or beside one and only look. ``../parts.py`` says what a part is."""
