# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is loaded by another number of ranks in two steps, and DeepSpeed's error says which.

To DeepSpeed: ``ds_to_universal.py`` refuses each checkpoint of ZeRO-1 and ZeRO-2 whose user has not written
``universal_checkpoint_info`` into it ("Verify that client creates this state"), although without model parallelism it
needs nothing of that but a version, which ``--inject_missing_state`` makes up. Please make this the default there, and
have the error on another number of ranks name the command.
"""
