# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What this fork says to the user while it trains."""

import logging

from deepspeed.utils.logging import get_dist_msg, log_dist, logger


def inform(text: str) -> None:
    """Logs a line on rank 0, which DeepSpeed shows with ``"log_level": "info"``."""
    log_dist(text, ranks=[0], level=logging.INFO)


def tell(text: str) -> None:
    """Logs a line on rank 0 that DeepSpeed shows by default, as it shows warnings, though this is none."""
    message = get_dist_msg(text, ranks=[0])
    if message is not None and logger.isEnabledFor(logging.WARNING):
        record = logger.makeRecord(logger.name, logging.WARNING, *logger.findCaller()[:2], message, (), None, "tell")
        record.levelname = "INFO"
        logger.handle(record)


def warn(text: str) -> None:
    """Logs a warning on rank 0: all ranks have the same reason for it."""
    log_dist(text, ranks=[0], level=logging.WARNING)
