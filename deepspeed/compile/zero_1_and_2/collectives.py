# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Errors of collectives that say what this rank could not do, and timeouts of process groups."""

import contextlib
from typing import TYPE_CHECKING, Iterator

import torch

import deepspeed.comm as dist

from .gradient.native import reducer_module

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# What gloo's errors contain: the path of gloo's source, but in one of them.
_OF_GLOO = ("gloo/", "Application timeout caused pair closure")


@contextlib.contextmanager
def collective(purpose: str) -> Iterator[None]:
    """Context of a collective that raises the collective's error again, as DistBackendError, with its purpose.

    The message says "DeepCompile could not" and the purpose.

    Errors of other ranks arrive as torch's DistError from NCCL, and from gloo as plain RuntimeErrors, which only their
    text tells from others. Any other error is this rank's own and stays as it is. The native code does the same around
    its own collectives (``throw_for_other_ranks()``).

    Raises:
        DistBackendError: if the collective raised.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and not any(text in str(error) for text in _OF_GLOO):
            raise
        raise torch.distributed.DistBackendError(reducer_module().could_not(purpose, str(error))) from error


def shorten_timeouts(optimizer: "DeepSpeedZeroOptimizer") -> None:
    """Shortens the timeout of the optimizer's process groups to the timeout of the world's process group.

    DeepSpeed makes these groups with torch's default timeout, which is half an hour with gloo, and ignores the timeout
    given to ``init_distributed()``. A timeout that is already shorter stays as it is.
    """
    for group in {optimizer.dp_process_group, *optimizer.real_dp_process_group} - {None}:
        shorten_timeout(group, optimizer.bit16_groups_flat[0].device)


def shorten_timeout(group: "ProcessGroup", device: torch.device) -> None:
    """Shortens the timeout of a process group to the timeout of the world's. ``device``: of what the group sends."""
    world, backend = _communicating_backend(dist.get_world_group(), device), _communicating_backend(group, device)
    if {world.name(), backend.name()} <= {"gloo", "nccl"} and world.options._timeout < backend.options._timeout:
        backend.set_timeout(world.options._timeout)


def _communicating_backend(group, device):
    """Returns the backend that sends a process group's tensors on ``device``."""
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend, and torch 2.11's wrapper cannot set a timeout.
    return getattr(backend, "wrapped_pg", backend)
