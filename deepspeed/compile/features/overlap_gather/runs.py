# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Cuts parameters into runs, each of which one rank sends."""

from typing import Iterable, List, NamedTuple

from torch.nn import Parameter

from ...zero_1_and_2.layout import Layout


class Run(NamedTuple):
    """The elements [first, last) of a parameter group's flat tensor, which lie in the partition of rank ``owner``."""

    group: int
    first: int
    last: int
    owner: int


def runs(layouts: Iterable[Layout], parameters: Iterable[Parameter], parts_alone: bool = False) -> List[Run]:
    """Lists the runs that cover ``parameters``, in the order of the flat tensors.

    Adjacent pieces of one owner form one run, which includes the padding between the pieces.

    ``layouts``: of all parameter groups. ``parts_alone``: whether each piece of a parameter that has several owners is
    a run of its own.
    """
    wanted, found = {id(parameter) for parameter in parameters}, []
    for group, layout in enumerate(layouts):
        # The run that the next piece extends if the piece has the same owner.
        open_run = None
        for piece in layout.pieces:
            if id(piece.parameter) not in wanted:
                open_run = None
                continue
            is_alone = parts_alone and piece.numel < piece.parameter.numel()
            if open_run is not None and open_run.owner == piece.owner and not is_alone:
                open_run = found[-1] = open_run._replace(last=piece.first + piece.numel)
            else:
                open_run = Run(group, piece.first, piece.first + piece.numel, piece.owner)
                found.append(open_run)
            open_run = None if is_alone else open_run
    return found
