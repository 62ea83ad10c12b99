# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Distributes the new values of parameters after a ZeRO-1/2 step, in which each rank stepped its own partition."""

import contextlib
import weakref
from typing import Container, ContextManager, List, Optional, Tuple

from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..collectives import collective

PURPOSE = "get the parameters that other ranks have stepped"


class AllGather:
    """Gathers all parameters at once, before the step returns."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer):
        self._optimizer = weakref.ref(optimizer)

    def before_step(self) -> None:
        """Called on every rank when a step begins, before it makes views of the flat tensors."""

    def first_spans(self, group: int) -> List[Tuple[int, int]]:
        """Lists the spans to step before all others, because :meth:`start_first` can send them: [first, last) in
        elements of this rank's partition of a parameter group."""
        return []

    def start_first(self) -> None:
        """Called on every rank when the elements of :meth:`first_spans` have their new values, before
        :meth:`start`."""

    def start(self) -> None:
        """Called on every rank when the partitions hold their new values.

        Raises:
            DistBackendError: if the collective failed, for example because another rank died.
        """
        optimizer = self._optimizer()
        with collective(PURPOSE):
            all_gather_dp_groups(
                groups_flat=optimizer.bit16_groups_flat,
                partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
                dp_process_group=optimizer.real_dp_process_group,
                start_alignment_factor=optimizer.nccl_start_alignment_factor,
                allgather_bucket_size=optimizer.allgather_bucket_size,
            )

    def refuse_to_offload(self, include: Optional[Container[OffloadStateTypeEnum]]) -> None:
        """Raises ValueError if one of the states in ``include`` (None: of all states) cannot move to the host."""

    def linking(self) -> ContextManager:
        """Returns the context in which the base links parameters with views of the partitions."""
        return contextlib.nullcontext()

    def wait_all(self) -> None:
        """Does nothing: no parameter is on its way after ``start()``."""
