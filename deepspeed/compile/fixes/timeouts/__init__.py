# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gives the optimizer's process groups the timeout that the user has given to ``init_distributed()``."""
