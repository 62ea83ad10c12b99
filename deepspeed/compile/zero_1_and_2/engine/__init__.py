# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The set-up of DeepSpeed's engine, and the functions that the engine calls."""
