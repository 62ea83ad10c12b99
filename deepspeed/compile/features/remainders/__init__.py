# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps master weights as the parameters and 16 bits more: ``compile.store_param_remainders``."""

# Parts without which this one does not work.
NEEDS = ("one_pass_adam",)
