# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Warns of a torch with which nobody has run the fork on a GPU."""

from typing import Iterator

from packaging.version import Version

from .ds_report import NEWEST_ON_GPUS

UNTRIED = (
    "torch {} is newer than {}, the newest with which this edition of DeepSpeed was tested on GPUs; compare the first "
    "losses with those of a run with compile.deepcompile set to false"
)


def untried(version: str, device: str) -> Iterator[str]:
    """Yields a sentence if a version of torch is newer than those that were tested on GPUs, and the device is one."""
    if device == "cuda" and Version(version).release[:2] > Version(NEWEST_ON_GPUS).release:
        yield UNTRIED.format(version, NEWEST_ON_GPUS)
