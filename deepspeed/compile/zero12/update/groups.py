# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps this rank's partitions of all parameter groups, each by the first rule that serves it."""

import functools
from typing import TYPE_CHECKING, List, Optional

import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import OPTIMIZER_GRADIENTS_TIMER, OPTIMIZER_STEP_TIMER

from ..monitoring import timed
from ..offload import memory_for_new_parameters, send_to_device
from .compiled import CompiledUpdates
from .own_step import OwnStep, may_be_cut
from .ranges import PartitionGradient, Ranges, Step

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def make_rules(compiles: bool) -> List[CompiledUpdates]:
    """Returns the rules for the partitions of one engine, in the order in which they are asked for a step.

    Args:
        compiles: whether generated code may step partitions.
    """
    return [CompiledUpdates()] if compiles else []


def begin_steps(optimizer: "DeepSpeedZeroOptimizer", factor: Optional[torch.Tensor]) -> List[Optional[Step]]:
    """Begins the step of each parameter group. Nothing is changed yet.

    Args:
        optimizer: the ZeRO-1/2 optimizer.
        factor: an fp32 tensor [1] with which to multiply gradients, or None for 1.

    Returns:
        for each group a step of its ranges, or None if the optimizer must step the group whole.
    """
    may = [not optimizer.torch_autocast_gradscaler and each for each in may_be_cut(optimizer.optimizer)]
    return [_begin_step(optimizer, group, factor) if each else None for group, each in enumerate(may)]


def _begin_step(optimizer, group, factor):
    new = _partition(optimizer, group)
    for rule in optimizer._zero12.rules:
        step = rule.begin(optimizer.optimizer, group, factor, optimizer.gradient_accumulation_dtype, new)
        if step is not None:
            return step
    # Gradients that lie in one tensor need no copy if the optimizer steps them whole.
    lies_whole = optimizer.averaged_gradients[group].flat_partition is not None
    return None if lies_whole else OwnStep(optimizer.optimizer, group)


def finish_steps(
    optimizer: "DeepSpeedZeroOptimizer", factor: Optional[torch.Tensor], steps: List[Optional[Step]]
) -> None:
    """Steps the master weights of all groups, and writes them into this rank's partition of the parameters.

    Args:
        optimizer: the ZeRO-1/2 optimizer.
        factor: as for :func:`begin_steps`.
        steps: what :func:`begin_steps` returned.
    """
    gather, ranges = optimizer._zero12.gather, {}
    for group, step in enumerate(steps):
        if step is not None:
            ranges[group] = _ranges(optimizer, group, factor, step)
    # With offloading, new values are still on their way to the device when they are written.
    if len(ranges) == len(steps) and not optimizer.cpu_offload:
        with timed(optimizer, OPTIMIZER_STEP_TIMER):
            for group in ranges:
                ranges[group].step_first(gather.first_spans(group))
        gather.start_first()
    for group in range(len(steps)):
        if group in ranges:
            with timed(optimizer, OPTIMIZER_STEP_TIMER):
                # Drop the ranges of a group when it is stepped, because they hold memory for gradients.
                ranges.pop(group).step_rest()
        else:
            _step_whole(optimizer, group, factor)


def _ranges(optimizer, group, factor, step):
    gradient = _take_gradient(optimizer, group, factor)
    new, finish = (functools.partial(each, optimizer, group) for each in (_memory_of_new, _send))
    return Ranges(optimizer.optimizer, group, gradient, new, finish, step)


def _take_gradient(optimizer, group, factor):
    views, optimizer.averaged_gradients[group] = optimizer.averaged_gradients[group], None
    like = optimizer.single_partition_of_fp32_groups[group].data
    return PartitionGradient(views, factor, like, optimizer.gradient_accumulation_dtype)


def _step_whole(optimizer, group, factor):
    """Has the optimizer step the master weights of a group at once, and writes them into this rank's partition."""
    master = optimizer.single_partition_of_fp32_groups[group]
    with timed(optimizer, OPTIMIZER_GRADIENTS_TIMER):
        flat = optimizer.averaged_gradients[group].flat_partition
        gradient = _take_gradient(optimizer, group, factor)
        if flat is None:
            master.grad = gradient.scaled(0, master.numel())
        else:
            # All gradients lie in one tensor, in the dtype of the master weights.
            master.grad = flat if factor is None else flat.mul_(factor)
        del flat, gradient
    param_groups = optimizer.optimizer.param_groups
    try:
        with timed(optimizer, OPTIMIZER_STEP_TIMER):
            optimizer._optimizer_step(group)
    finally:
        # _optimizer_step() hides the other groups, and leaves them hidden if it raises. A checkpoint that is loaded
        # then needs all groups.
        optimizer.optimizer.param_groups = param_groups
        master.grad = None
    _memory_of_new(optimizer, group, 0, master.numel()).copy_(master.data)
    _send(optimizer, group, 0, master.numel())


def _memory_of_new(optimizer, group, first, last):
    """Returns the memory in which elements [first, last) of the new parameters are written: with offloading, on the
    host, and otherwise in this rank's partition of the parameters."""
    if optimizer.cpu_offload:
        return memory_for_new_parameters(optimizer, group)[first:last]
    return _partition(optimizer, group).data[first:last]


def _send(optimizer, group, first, last):
    """With offloading, sends elements [first, last) of the new parameters to the device."""
    if optimizer.cpu_offload:
        send_to_device(optimizer, group, first, _partition(optimizer, group).data[first:last])


def _partition(optimizer, group):
    """Returns this rank's partition of the parameters, 1-D."""
    rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
    return optimizer.parallel_partitioned_bit16_groups[group][rank]
