# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Errors of collectives that say what this rank could not do."""

import contextlib
from typing import Iterator

import torch

from .gradient.native import reducer_module

# What gloo's errors contain: the path of gloo's source, but in one of them.
_OF_GLOO = ("gloo/", "Application timeout caused pair closure")


@contextlib.contextmanager
def collective(purpose: str) -> Iterator[None]:
    """Context of a collective that raises the collective's error again, as DistBackendError, with its purpose.

    The message says "DeepCompile could not" and the purpose.

    Errors of other ranks arrive as torch's DistError from NCCL, and from gloo as plain RuntimeErrors, which only their
    text tells from others. Any other error is this rank's own and stays as it is. The native code does the same around
    its own collectives (``throw_for_other_ranks()``).

    Raises:
        DistBackendError: if the collective raised.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and not any(text in str(error) for text in _OF_GLOO):
            raise
        raise torch.distributed.DistBackendError(reducer_module().could_not(purpose, str(error))) from error
