# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Mends code of models that goes wrong or slows down under ``torch.compile``.

One file for each fix. The file's docstring is the issue that its library would get. To remove one fix, delete its
file, and its lines in ``feature.py``.
"""

# Parts without which this one does not work.
NEEDS = ("fixes.base", "features.configuration", "features.blocks")
