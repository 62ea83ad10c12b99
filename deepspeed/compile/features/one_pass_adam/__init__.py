# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps Adam and AdamW in one pass over memory, where generated code may."""
