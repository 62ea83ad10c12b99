# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Reads the section ``compile``: leaves out what has no effect, and says in one sentence what is wrong.

``deepspeed.initialize()`` refuses here, too, what any part cannot honour: before it changes anything, where it can.
It also refuses models that differ by rank.
"""
