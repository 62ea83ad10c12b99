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


class EveryRankRaises:
    """Context that ends with an exchange of all ranks of a group: if one rank raised in it, every rank raises.

    Otherwise the other ranks would wait for that rank in their next collective. What runs within must have no
    collectives, for which a rank that raised before them does not come. Every rank that raised raises its own error.

    Args:
        purpose: what a rank that raised could not do, such as "set the engine up".
        group: None means the world.

    Raises:
        ValueError: if another rank raised one; the message names that rank and says what that rank said.
        RuntimeError: likewise for other errors.
    """

    def __init__(self, purpose: str, group: "Optional[ProcessGroup]" = None):
        self._purpose, self._group = purpose, group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: Optional[BaseException], traceback: object) -> None:
        if error is not None and not isinstance(error, Exception):
            # Such as KeyboardInterrupt, which mostly ends all ranks.
            return
        said = None if error is None else (isinstance(error, ValueError), f"{type(error).__name__}: {error}")
        if error is not None:
            # If the others are gone, this rank's own error is the one to raise.
            with contextlib.suppress(RuntimeError):
                self._exchange(said)
            return
        for rank, of_rank in enumerate(self._exchange(said)):
            if of_rank is not None:
                is_value, text = of_rank
                text = f"rank {self._name(rank)} could not {self._purpose}, so no rank goes on. It says: {text}"
                raise ValueError(text) if is_value else RuntimeError(text)

    def _exchange(self, said: Optional[Tuple[bool, str]]) -> List[Optional[Tuple[bool, str]]]:
        of_all: List[Optional[Tuple[bool, str]]] = [None] * torch.distributed.get_world_size(self._group)
        with collective(f"learn whether all ranks could {self._purpose}"):
            # Not of DeepSpeed, whose log of communication ends the process at this function.
            torch.distributed.all_gather_object(of_all, said, self._group)
        return of_all

    def _name(self, rank: int) -> int:
        return rank if self._group is None else torch.distributed.get_global_rank(self._group, rank)
