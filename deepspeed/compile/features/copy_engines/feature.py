# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Carries gradients and parameters by copy engines (``compile.copy_engines``)."""

from typing import TYPE_CHECKING, Dict, Iterator, Optional

import deepspeed.comm as dist
from deepspeed.utils import logger

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.messages import log_notice
from ...zero_1_and_2.parameter.carrier import carriers_of
from .carrier import CopyEngineCarrier, device_bytes
from .possible import why_impossible, why_not_here

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from ...zero_1_and_2.gradient.native import Reducer


class CopyEngines(Feature):
    """Puts a carrier of copy engines in place of the collectives of each process group on one host."""

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        if request.options.copy_engines:
            reason = why_impossible(_world(request))
            if reason:
                yield _cannot(reason)

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return request.options.copy_engines is not False and not why_impossible(_world(request))

    def __init__(self, context: SetUpContext):
        self._is_asked_for = bool(context.request.options.copy_engines)
        # Sharded parameters free the memory of flat tensors, which mapped memory cannot.
        self._keeps_flat = context.request.options.sharded != "all"
        self._undo = context.undo

    def carry(self, optimizer: "DeepSpeedZeroOptimizer", reducer: "Reducer") -> None:
        carriers: "Dict[Optional[ProcessGroup], CopyEngineCarrier]" = {}
        for index, group in enumerate(optimizer.real_dp_process_group):
            if dist.get_world_size(group) == 1:
                continue
            if group not in carriers:
                # None is the group of all ranks.
                carrier = self._carrier_for(group or dist.get_world_group(), optimizer.bit16_groups_flat[index].device)
                if carrier is None:
                    continue
                carriers[group] = carrier
                carriers_of(optimizer)[group] = carrier
                # Not the optimizer, which holds these functions.
                self._undo.callback(_end, carriers_of(optimizer), group, carrier)
            reducer.set_carrier(index, carriers[group].native)
        if carriers:
            mib = sum(device_bytes(dist.get_world_size(group)) for group in carriers) / 2**20
            log_notice(
                f"DeepCompile: copy engines carry gradients and parameters between the GPUs of this host, through "
                f"{mib:.0f} MiB on each (compile.copy_engines)"
            )

    def _carrier_for(self, group, device):
        reason = why_not_here(group, device)
        if not reason:
            try:
                return CopyEngineCarrier(group, device, maps_flat=self._keeps_flat)
            except (RuntimeError, OSError) as error:
                # On the rank that has failed its own error, and on the others one that tells of it.
                reason = str(error).splitlines()[0]
        if self._is_asked_for:
            raise ValueError(_cannot(reason))
        log_notice(f"DeepCompile: NCCL carries gradients and parameters: copy engines cannot, because {reason}")
        return None


def _end(carriers, group, carrier):
    carriers.pop(group, None)
    try:
        carrier.close()
    except RuntimeError as error:
        logger.warning(f"The engine is destroyed, but its copy engines could not be stopped: {error}")


def _cannot(reason):
    return f"compile.copy_engines cannot be honoured here: {reason}; set it to null or false"


def _world(request):
    # DeepSpeed makes the group after the first check of options. Then the world is the best that is known.
    return dist.get_world_size(getattr(request.engine, "seq_data_parallel_group", None))


FEATURE = CopyEngines
