# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Mends the base, DeepSpeed, by edits of its files.

One file for each fix. The file's docstring is the issue that DeepSpeed would get. ``edits.py`` has the lines that call
the files, and the fixes that are no more than such lines. To remove one fix, delete its file, its edits, and what
other parts import of it.
"""
