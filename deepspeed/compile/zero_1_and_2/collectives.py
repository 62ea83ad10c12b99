# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Errors of collectives that say what this rank could not do, and errors of one rank that all ranks raise."""

import contextlib
from typing import TYPE_CHECKING, Iterator, List, Optional, Tuple

import torch

from .gradient.native import reducer_module

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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


@contextlib.contextmanager
def every_rank_raises(purpose: str, group: "Optional[ProcessGroup]" = None) -> Iterator[None]:
    """Context that ends with an exchange of all ranks of a group, or of the world: if one raised, every rank raises.

    Otherwise the others would wait for that rank in their next collective. What runs within has no collectives, to
    which such a rank would not come. A rank that raised raises its own error. The others raise a ValueError if it is
    one, and else a RuntimeError, which says which rank could not do what ``purpose`` names, and why.
    """
    group, own = group or torch.distributed.group.WORLD, None
    try:
        yield
    except Exception as error:
        own = error
    said = None if own is None else (isinstance(own, ValueError), f"{type(own).__name__}: {own}")
    of_all: List[Optional[Tuple[bool, str]]] = [None] * torch.distributed.get_world_size(group)
    # If the others are gone, this rank's own error is the one to raise.
    with collective(f"learn whether all ranks could {purpose}") if own is None else contextlib.suppress(RuntimeError):
        # Not of DeepSpeed, whose log of communication ends the process at this function.
        torch.distributed.all_gather_object(of_all, said, group)
    if own is not None:
        raise own
    for rank, of_rank in enumerate(of_all):
        if of_rank is not None:
            rank = torch.distributed.get_global_rank(group, rank)
            text = f"rank {rank} could not {purpose}, so no rank goes on. It says: {of_rank[1]}"
            raise ValueError(text) if of_rank[0] else RuntimeError(text)
