# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Has compiled code notice hooks that modules get later, and frozen parameters that are trained later."""
