# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Whether the copy engines of an engine's ranks can carry what the ranks send each other."""

import os
from pathlib import Path
from typing import List, Optional

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator

# A machine has another text there after each start.
BOOT = Path("/proc/sys/kernel/random/boot_id")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


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
    dist.all_gather_object(told, (boot, why_not_on_this_rank(group, device)), group)
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
