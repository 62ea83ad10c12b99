# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Warns of a torch with which nobody has run the fork on a GPU."""

from typing import Iterator

import torch
from packaging.version import Version

from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.feature import Feature, Request
from . import NEWEST_ON_GPUS

UNTRIED = (
    "torch {} is newer than {}, the newest with which this edition of DeepSpeed was tested on GPUs; compare the first "
    "losses with those of a run with compile.deepcompile set to false"
)


def untried(version: str, device: str) -> Iterator[str]:
    """Yields a sentence if a version of torch is newer than those that were tested on GPUs, and the device is one."""
    if device == "cuda" and Version(version).release[:2] > Version(NEWEST_ON_GPUS).release:
        yield UNTRIED.format(version, NEWEST_ON_GPUS)


class Untried(Feature):
    """Says so when an engine is made. There is nothing to do for the engine."""

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        yield from untried(torch.__version__, get_accelerator().device_name())

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return False


FEATURE = Untried
