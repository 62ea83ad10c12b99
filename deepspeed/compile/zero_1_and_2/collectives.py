# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Errors of collectives that name their purpose, and errors of one rank that all ranks raise."""

import contextlib
from typing import Any, Iterator, List, Optional, Tuple

import torch
from torch.distributed import ProcessGroup

from .gradient.native import reducer_module

# Texts in gloo's errors: the path of gloo's source, or the one message without it.
_OF_GLOO = ("gloo/", "Application timeout caused pair closure")


@contextlib.contextmanager
def collective(purpose: str) -> Iterator[None]:
    """Context that raises the error of a collective again, as a DistBackendError that names the purpose.

    The message begins with "DeepCompile could not" and the purpose.

    NCCL reports errors of other ranks as torch's DistError. Gloo reports them as RuntimeErrors, which only their text
    distinguishes. Any other error is this rank's own and stays as it is. The native code does the same around its own
    collectives (``throw_for_other_ranks()``).

    Raises:
        DistBackendError: if the collective raised.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and not any(text in str(error) for text in _OF_GLOO):
            raise
        raise torch.distributed.DistBackendError(reducer_module().could_not(purpose, str(error))) from error


def of_first_rank(value: Any, what: str, group: Optional[ProcessGroup] = None) -> Any:
    """Returns the value of the first rank of a group, or of the world. All ranks call it. ``what``: the values."""
    first = torch.distributed.get_global_rank(group, 0) if group is not None else 0
    values = [value if torch.distributed.get_rank() == first else None]
    with collective(f"learn whether the {what} are the same"):
        torch.distributed.broadcast_object_list(values, src=first, group=group)
    return values[0]


@contextlib.contextmanager
def every_rank_raises(purpose: str, group: Optional[ProcessGroup] = None) -> Iterator[None]:
    """Context at whose end all ranks of a group, or of the world, compare errors: if one raised, every rank raises.

    Otherwise the other ranks would wait for that rank in their next collective. The code within must not call a
    collective, which a rank that raised would miss. A rank that raised raises its own error. The other ranks raise a
    ValueError for a ValueError, and a RuntimeError for any other error. Its message names the rank, ``purpose`` and
    the error.
    """
    group, own = group or torch.distributed.group.WORLD, None
    try:
        yield
    except Exception as error:
        own = error
    sent = None if own is None else (isinstance(own, ValueError), f"{type(own).__name__}: {own}")
    reports: List[Optional[Tuple[bool, str]]] = [None] * torch.distributed.get_world_size(group)
    # If the other ranks are gone, raise this rank's own error.
    with collective(f"learn whether all ranks could {purpose}") if own is None else contextlib.suppress(RuntimeError):
        # Call torch: DeepSpeed's communication log ends the process in this function.
        torch.distributed.all_gather_object(reports, sent, group)
    if own is not None:
        raise own
    for rank, report in enumerate(reports):
        if report is not None:
            is_value_error, said = report
            rank = torch.distributed.get_global_rank(group, rank)
            text = f"rank {rank} could not {purpose}, so no rank goes on. It says: {said}"
            raise ValueError(text) if is_value_error else RuntimeError(text)
