# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optional parts that mend DeepSpeed, transformers, peft or Liger. ``../parts.py`` describes parts.

Remove a fix when its upstream has the change that the docstring of its file asks for.
"""
