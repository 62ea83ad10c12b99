# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Carries gradients and parameters by copy engines (``compile.copy_engines``)."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Iterator, List, Optional

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.messages import log_notice
from ...zero_1_and_2.parameter.carrier import carriers_of
from .carrier import CopyEngineCarrier, device_bytes

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from ...zero_1_and_2.gradient.native import Reducer

# A machine has another text there after each start.
BOOT = Path("/proc/sys/kernel/random/boot_id")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


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
        carriers: Dict[Optional[ProcessGroup], CopyEngineCarrier] = {}
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


# Whether the copy engines of an engine's ranks can carry what the ranks send each other -----------------------------


def why_impossible(world: int) -> str:
    """Returns why copy engines cannot serve a world of ranks, as far as every rank can tell alike; "" if they may."""
    if get_accelerator().device_name() != "cuda" or torch.version.hip:
        return "only NVIDIA GPUs have the copy engines for it"
    if world == 1:
        return "a single rank sends nothing"
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and int(local) < world:
        return "ranks are on several hosts"
    return ""


def why_not_here(group: ProcessGroup, device: torch.device) -> str:
    """Returns why copy engines cannot carry for a process group, or "". All ranks of the group call it, and get the
    same answer."""
    told: List[Optional[tuple]] = [None] * dist.get_world_size(group)
    boot = BOOT.read_text().strip() if BOOT.is_file() else os.uname().nodename
    torch.distributed.all_gather_object(told, (boot, why_not_on_this_rank(group, device)), group)
    boots, problems = zip(*[one for one in told if one is not None], strict=True)
    if len(set(boots)) > 1:
        return "ranks are on several hosts"
    return next(filter(None, problems), "")


def why_not_on_this_rank(group: ProcessGroup, device: torch.device) -> str:
    """Returns why copy engines of this rank cannot carry, or ""."""
    if device.type != "cuda":
        return "parameters are not on GPUs"
    # A stream that waits for another rank would hold up all others, also that for which this rank waits there.
    if os.environ.get(CONNECTIONS) == "1":
        return f"{CONNECTIONS}=1 makes the streams of a GPU wait for each other"
    backend = group._get_backend(device).name()
    if backend != "nccl":
        return f"the process group's backend is {backend}"
    for other in range(torch.cuda.device_count()):
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            return f"GPU {device.index} cannot read the memory of GPU {other}"
    return ""
