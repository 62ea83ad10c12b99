# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the fork reports: compilations in the log, counters to DeepSpeed's monitors, its lines of ``ds_report``, and a
torch newer than the tested ones."""

# Parts without which this one does not work.
NEEDS = ("features.blocks",)
