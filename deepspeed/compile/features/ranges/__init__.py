# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Has an optimizer that treats each element by itself step a partition range by range."""
