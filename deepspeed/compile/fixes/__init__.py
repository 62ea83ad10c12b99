# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optional parts that mend DeepSpeed, transformers, peft or Liger. ``../parts.py`` says what a part is.

Each goes when its upstream has what the docstring of its ``__init__.py`` asks for.
"""
