# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gives the optimizer's process groups the user's timeout: a rank that waits for a dead rank raises after it.

To DeepSpeed: ``new_group()`` gets torch's default timeout, half an hour with gloo, whatever timeout
``init_distributed()`` was given, so a rank waits that long for a dead rank. Please pass the timeout on.
"""

from typing import TYPE_CHECKING

import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deepspeed.runtime.engine import DeepSpeedEngine


def trains_here(engine: "DeepSpeedEngine") -> bool:
    """Whether an engine trains under DeepCompile ZeRO-1/2, or will when it is compiled."""
    # The passes of AutoSP and AutoTP are DeepSpeed's own.
    is_ours = engine.is_deepcompile_enabled() and not engine.uses_parallelization_pass_only()
    return is_ours and isinstance(engine.optimizer, DeepSpeedZeroOptimizer)


def shorten_timeouts(engine: "DeepSpeedEngine") -> None:
    """Called at the end of ``deepspeed.initialize()``, when no option was refused.

    Shortens the timeout of the ZeRO-1/2 optimizer's process groups under DeepCompile to the timeout of the world's
    group. A shorter timeout stays as it is.
    """
    optimizer = engine.optimizer
    if not trains_here(engine):
        return
    for group in {optimizer.dp_process_group, *optimizer.real_dp_process_group} - {None}:
        shorten_timeout(group, optimizer.bit16_groups_flat[0].device)


def shorten_timeout(group: "ProcessGroup", device: torch.device) -> None:
    """Shortens the timeout of a process group to that of the world. ``device``: the device of the sent tensors."""
    world, backend = _communicating_backend(dist.get_world_group(), device), _communicating_backend(group, device)
    if {world.name(), backend.name()} <= {"gloo", "nccl"} and world.options._timeout < backend.options._timeout:
        backend.set_timeout(world.options._timeout)


def _communicating_backend(group, device):
    """Returns the backend that sends a process group's tensors on ``device``."""
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend, and torch 2.11's wrapper cannot set a timeout.
    return getattr(backend, "wrapped_pg", backend)
