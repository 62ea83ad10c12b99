# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gives the optimizer's process groups the user's timeout of ``init_distributed()``.

To DeepSpeed: ``new_group()`` gets torch's default timeout, half an hour with gloo, whatever timeout
``init_distributed()`` was given, so a rank waits that long for a dead rank. Please pass the timeout on.
"""
