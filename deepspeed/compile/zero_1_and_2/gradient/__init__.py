# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The life of a gradient, from the native reducer to the views that the optimizer gets."""
