# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optional parts that mend DeepSpeed, transformers, peft or Liger. ``../parts.py`` describes parts.

Remove a part when its upstream has the change that the docstring of the part's ``__init__.py`` asks for.
"""
