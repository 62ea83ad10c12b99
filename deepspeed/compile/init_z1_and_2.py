# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
# Name and signature of the function are those of the base's init_z1_and_2.py, which is
# Copyright (c) Microsoft Corporation.
# SPDX-License-Identifier: Apache-2.0
"""The entry of DeepCompile for ZeRO-1 and ZeRO-2, which the base's ``engine.compile()`` calls."""

from .zero_1_and_2.engine.set_up import set_up as init_z1_and_2

__all__ = ["init_z1_and_2"]
