# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How many blocks stay whole from their forward to their backward (``compile.keep_gathered``)."""

import itertools
from typing import Sequence

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist

from ...zero_1_and_2.collectives import collective
from .unit import Unit

# After so many steps, memory has been used as in later ones: the second has all optimizer states from its beginning.
STEPS_BEFORE = 2
# Part of a device's memory that is left free, because an allocator cannot use all of it.
LEFT_FREE = 0.05
# From so many ranks on, the last block stays by default. The backward begins with it, so nothing hides its gather,
# which takes the longer the more ranks there are (docs/results/scale.md).
KEEP_LAST_FROM = 256


def kept_by_default(ranks: int) -> int:
    """Returns how many blocks stay whole where the option says nothing."""
    return 1 if ranks >= KEEP_LAST_FROM else 0


def blocks_that_fit(units: Sequence[Unit], process_group: ProcessGroup, device: torch.device) -> int:
    """Returns how many units, the last ones first, fit into the memory that no rank has needed until now.

    All ranks call this, and get the same number.
    """
    spare = spare_memory(device)
    sizes = itertools.accumulate(unit.memory.nbytes for unit in reversed(units))
    number = torch.tensor(sum(size <= spare for size in sizes), device=device)
    with collective("agree how many blocks stay whole"):
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=process_group)
    return int(number)


def spare_memory(device: torch.device) -> float:
    """Returns how many bytes of a device nobody has taken: 0 for a CPU, because other programs use its memory."""
    if device.type == "cpu":
        return 0
    # Not what the allocator holds beyond its peak: programs set that peak back for their own measurements.
    free, total = torch.get_device_module(device).mem_get_info(device)
    return free - LEFT_FREE * total
