# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer on the host: what is refused, and where gradients and new parameters are written."""

from typing import Iterator

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from .host_memory import HostMemory


class FillsDictLater:
    """The method of the base's ZeRO-1/2 optimizer that fills the dict in which parameters find their gradients."""

    def _get_offload_gradient_dict(self):
        """Does nothing: ``HostMemory`` fills the dict when gradients are handed over."""


class Offload(Feature):
    """Has gradients and new parameters written into host memory."""

    optimizer_mixin = FillsDictLater

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        if not cls.is_wanted(request):
            return
        offload = request.engine._config.zero_config.offload_optimizer
        if offload.device == OffloadDeviceEnum.nvme:
            yield "zero_optimization.offload_optimizer.device='nvme' is only supported in stage 3; use 'cpu'"
        if offload.super_offload:
            yield "zero_optimization.offload_optimizer.super_offload is only supported in stage 3; leave it out"

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        if cls.is_wanted(request) and not request.engine._config.zero_config.ignore_unused_parameters:
            yield (
                "zero_optimization.ignore_unused_parameters=False has no effect, because a parameter without a "
                "gradient is stepped on zeros"
            )

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        offload = request.engine._config.zero_config.offload_optimizer
        return offload is not None and offload.device != OffloadDeviceEnum.none

    def __init__(self, context: SetUpContext):
        self.placement = HostMemory()

    def attached(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        # The reducer has replaced the base's way of reducing.
        self.placement.drop_memory_of_base(optimizer)


FEATURE = Offload
