# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Logs lines for the user during training."""

import logging

from deepspeed.utils.logging import get_dist_msg, log_dist, logger


def log_info(text: str) -> None:
    """Logs a line on rank 0, which DeepSpeed shows with ``"log_level": "info"``."""
    log_dist(text, ranks=[0], level=logging.INFO)


def log_notice(text: str, rank: int = 0) -> None:
    """Logs a line at level INFO on one rank that DeepSpeed shows by default, as it shows warnings."""
    message = get_dist_msg(text, ranks=[rank])
    if message is not None and logger.isEnabledFor(logging.WARNING):
        file, line, function, _ = logger.findCaller()
        record = logger.makeRecord(logger.name, logging.WARNING, file, line, message, (), None, function)
        record.levelname = "INFO"
        logger.handle(record)


def warn(text: str) -> None:
    """Logs a warning on rank 0: all ranks have the same reason for it."""
    log_dist(text, ranks=[0], level=logging.WARNING)
