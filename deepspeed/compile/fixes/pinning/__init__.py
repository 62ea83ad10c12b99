# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Says in an error of pinned host memory how much could not be had, and which option helps."""
