# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps an optimizer on the host (``zero_optimization.offload_optimizer``)."""

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from .host_memory import HostMemory


class OffloadOptimizer(Feature):
    """Places gradients and new parameters in host memory, where the optimizer is."""

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return bool(getattr(request.engine.optimizer, "cpu_offload", False))

    def __init__(self, context: SetUpContext):
        self.placement = HostMemory()


FEATURE = OffloadOptimizer
