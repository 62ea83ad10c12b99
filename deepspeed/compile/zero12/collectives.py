# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Errors of collectives that say what this rank could not do."""

import contextlib
from typing import Iterator

import torch

from .native import reducer_module


@contextlib.contextmanager
def collective(purpose: str) -> Iterator[None]:
    """Context of a collective that raises the collective's error again, as DistBackendError, with its purpose.

    gloo raises plain RuntimeErrors, so the context converts every RuntimeError but those of this rank's own device.
    The native code does the same around its own collectives (``throw_for_other_ranks()``).

    Args:
        purpose: what completes "DeepCompile could not" in the message.

    Raises:
        DistBackendError: if the collective raised.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # The error is about this rank's own device, not about another rank.
        raise
    except RuntimeError as error:
        raise torch.distributed.DistBackendError(reducer_module().could_not(purpose, str(error))) from error
