# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of gradients and new parameters of this rank's partitions."""

import contextlib
from typing import ContextManager, Optional

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..gradient.views import PartitionViews
from .runs import Runs, own_parameters


class Placement:
    """Gradients lie on the device, in memory of the reducer, and new parameters are written where parameters lie.

    A part places them elsewhere, if ``offload_optimizer`` puts the optimizer on the host.
    """

    # Whether gradients lie in host memory, and the step writes new parameters over them.
    on_host = False

    def gradients(self, optimizer: DeepSpeedZeroOptimizer, group: int, partition_numel: int) -> Optional[torch.Tensor]:
        """Called once for each parameter group when an engine is set up.

        Returns:
            Host memory for the gradients of this rank's partition, 1-D, of ``partition_numel`` elements in the
            gradient accumulation dtype, or None for memory of the reducer.

        Raises:
            RuntimeError: if the memory cannot be allocated, or if no part serves an optimizer on the host.
        """
        if optimizer.cpu_offload:
            raise RuntimeError("DeepCompile needs its part features.offload_optimizer for an optimizer on the host")
        return None

    def drop_memory_of_base(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Called when the reducer has replaced the base's way of reducing. Here the base keeps no memory for it."""

    def hand_over(self, optimizer: DeepSpeedZeroOptimizer, group: int, views: Optional[PartitionViews]) -> None:
        """Called when ``averaged_gradients[group]`` gets its gradients, or None when they are released."""

    def new_parameters(self, optimizer: DeepSpeedZeroOptimizer, group: int) -> Runs:
        """Returns where the step writes the new parameters of this rank's partition.

        The gradient of an element may lie where its new value is written.
        """
        return own_parameters(optimizer, group)

    def send(self, optimizer: DeepSpeedZeroOptimizer, group: int, first: int, last: int) -> None:
        """Called when elements [first, last) of :meth:`new_parameters` are written: copies them to the parameters
        if they lie elsewhere."""

    def sending(self, optimizer: DeepSpeedZeroOptimizer) -> ContextManager:
        """Returns the context of calls of :meth:`send`, whose copies run after the current stream's work and before
        its later work."""
        return contextlib.nullcontext()
