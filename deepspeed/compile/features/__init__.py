# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optional parts that change how an engine trains. ``../parts.py`` describes parts."""
