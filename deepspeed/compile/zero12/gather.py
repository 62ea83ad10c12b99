# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How parameters get their new values after a ZeRO-1/2 step, of which each rank has computed a partition.

:class:`AllGather` is done when the step is. :class:`OverlappedGather` (``compile.overlap_param_gather``) sends while
the next forward runs; ``gather_hooks.py`` says where the forward waits.
"""

import weakref
from typing import Dict, Iterable, List, Set

from torch.nn import Parameter

import deepspeed.comm as dist
from deepspeed.runtime.utils import all_gather_dp_groups

from .collectives import collective
from .layout import runs

PURPOSE = "get the parameters that other ranks have stepped"


class AllGather:
    """Gathers all parameters at once, before the step returns."""

    def __init__(self, optimizer):
        self._optimizer = weakref.ref(optimizer)

    def start(self) -> None:
        """Called on every rank when the partitions hold their new values."""
        optimizer = self._optimizer()
        with collective(PURPOSE):
            all_gather_dp_groups(
                groups_flat=optimizer.bit16_groups_flat,
                partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
                dp_process_group=optimizer.real_dp_process_group,
                start_alignment_factor=optimizer.nccl_start_alignment_factor,
                allgather_bucket_size=optimizer.allgather_bucket_size,
            )

    def wait_all(self) -> None:
        """There is nothing to wait for."""


class OverlappedGather:
    """Sends each partition's parameters to the other ranks while the next forward runs.

    Args:
        optimizer: a ZeRO-1/2 optimizer.
        units: parameters that are waited for together, in the order in which they are sent; each of the optimizer's is
            in one. A unit is sent as few contiguous runs, each by the rank that owns it.
    """

    def __init__(self, optimizer, units: List[List[Parameter]]):
        self._optimizer = weakref.ref(optimizer)
        self._unit_of = {id(parameter): index for index, unit in enumerate(units) for parameter in unit}
        self._runs = [runs(optimizer, unit) for unit in units]
        # Of each unit that is on its way.
        self._works: Dict[int, list] = {}

    def start(self) -> None:
        """Called on every rank when the partitions hold their new values. Returns while they are being sent."""
        self.wait_all()
        optimizer = self._optimizer()
        with collective(PURPOSE):
            for index, unit in enumerate(self._runs):
                self._works[index] = [
                    dist.broadcast(
                        optimizer.bit16_groups_flat[group].narrow(0, first, last - first),
                        src=dist.get_global_rank(optimizer.real_dp_process_group[group], owner),
                        group=optimizer.real_dp_process_group[group],
                        async_op=True,
                    )
                    for group, first, last, owner in unit
                    # A rank that is alone has nobody to send to.
                    if dist.get_world_size(optimizer.real_dp_process_group[group]) > 1
                ]

    def units_of(self, parameters: Iterable[Parameter]) -> Set[int]:
        """Returns the numbers of the units in which these are; frozen parameters are in none."""
        return {self._unit_of[id(parameter)] for parameter in parameters if id(parameter) in self._unit_of}

    def wait(self, units: Iterable[int]) -> None:
        """Has the current stream, and on a CPU the caller, wait for these units."""
        if self._works:
            for index in units:
                works = self._works.get(index, [])
                while works:
                    # One whose wait raised is asked again: its parameters must not be used.
                    with collective(PURPOSE):
                        works[-1].wait()
                    works.pop()
                self._works.pop(index, None)

    def wait_all(self) -> None:
        """Waits for all that is on its way."""
        self.wait(sorted(self._works))
