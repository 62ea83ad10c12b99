# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What this fork says to the user while it trains."""

import logging

from deepspeed.utils import log_dist


def inform(text: str) -> None:
    """Logs a line on rank 0, which DeepSpeed shows with ``"log_level": "info"``."""
    log_dist(text, ranks=[0], level=logging.INFO)


def warn(text: str) -> None:
    """Logs a warning on rank 0: all ranks have the same reason for it."""
    log_dist(text, ranks=[0], level=logging.WARNING)
