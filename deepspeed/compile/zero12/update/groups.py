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
from .authors import is_replaced
from .compiled import CompiledUpdates
from .own_step import OwnStep, may_be_cut
from .ranges import PartitionGradient, Ranges
from .rule import Partition, Rule

# Elements of a partition that is stepped whole even if a part of it is sent before the rest.
SMALL_NUMEL = 2**24

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def make_rules(compiles: bool) -> List[Rule]:
    """Returns the rules for the partitions of one engine, in the order in which they are asked for a step.

    Args:
        compiles: whether generated code may step partitions.
    """
    return [CompiledUpdates()] if compiles else []


class StepOfGroups:
    """One step of this rank's partitions of all parameter groups. Nothing is changed before :meth:`run`.

    Args:
        optimizer: the ZeRO-1/2 optimizer.
        factor: an fp32 tensor [1] with which to multiply gradients, or None for 1.
    """

    def __init__(self, optimizer: "DeepSpeedZeroOptimizer", factor: Optional[torch.Tensor]):
        self._optimizer, self._factor = optimizer, factor
        # The optimizer may have got more parameter groups, which are none of ZeRO's.
        may = may_be_cut(optimizer.optimizer)[: len(optimizer.bit16_groups)]
        if optimizer.torch_autocast_gradscaler or is_replaced(optimizer._optimizer_step):
            may = [False] * len(may)
        self._may_be_cut = may
        self._steps = [self._by_rule(group) for group in range(len(may))]

    def _by_rule(self, group):
        optimizer, may = self._optimizer, self._may_be_cut[group]
        dtype, new = optimizer.gradient_accumulation_dtype, _partition(optimizer, group)
        partition = Partition(optimizer.optimizer, group, may, self._factor, dtype, new)
        return next(filter(None, (rule.begin(partition) for rule in optimizer._zero12.rules)), None)

    def run(self) -> None:
        """Steps the master weights of all groups, and writes them into this rank's partition of the parameters."""
        optimizer = self._optimizer
        gather, ranges = optimizer._zero12.gather, {}
        for group, step in enumerate(self._steps):
            # Gradients that lie in one tensor need no copy if the optimizer steps them whole.
            lies_whole = optimizer.averaged_gradients[group].flat_partition is not None
            if step is not None or (self._may_be_cut[group] and not lies_whole):
                ranges[group] = self._ranges(group, step or OwnStep(optimizer.optimizer, group))
        # With offloading, new values are still on their way to the device when they are written.
        if len(ranges) == len(self._steps) and not optimizer.cpu_offload:
            with timed(optimizer, OPTIMIZER_STEP_TIMER):
                for group in ranges:
                    ranges[group].step_first(self._first_spans(group))
            gather.start_first()
        for group in range(len(self._steps)):
            if group in ranges:
                with timed(optimizer, OPTIMIZER_STEP_TIMER):
                    # Drop the ranges of a group when it is stepped, because they hold memory for gradients.
                    ranges.pop(group).step_rest()
            else:
                self._step_whole(group)

    def _first_spans(self, group):
        """Returns what is to be stepped before the rest of a partition, because it is sent before."""
        spans = self._optimizer._zero12.gather.first_spans(group)
        numel = self._optimizer.single_partition_of_fp32_groups[group].numel()
        # To have the optimizer step a few parts of a small partition takes longer than to have it step the whole.
        return [(0, numel)] if spans and self._steps[group] is None and numel < SMALL_NUMEL else spans

    def _ranges(self, group, step):
        optimizer = self._optimizer
        numel = optimizer.single_partition_of_fp32_groups[group].numel()
        new, written = (functools.partial(each, optimizer, group) for each in (_memory_of_new, _send))
        return Ranges(step, numel, self._take_gradient(group), new, written)

    def _take_gradient(self, group):
        """Takes the gradient of a partition out of ``averaged_gradients``."""
        optimizer = self._optimizer
        views, optimizer.averaged_gradients[group] = optimizer.averaged_gradients[group], None
        like = optimizer.single_partition_of_fp32_groups[group].data
        return PartitionGradient(views, self._factor, like, optimizer.gradient_accumulation_dtype)

    def _take_whole(self, group):
        """Takes the gradient of a partition as one scaled tensor, 1-D in the dtype of the master weights."""
        optimizer = self._optimizer
        flat = optimizer.averaged_gradients[group].flat_partition
        if flat is None:
            numel = optimizer.single_partition_of_fp32_groups[group].numel()
            return self._take_gradient(group).scaled(0, numel)
        optimizer.averaged_gradients[group].release_grad_buffers()
        optimizer.averaged_gradients[group] = None
        return flat if self._factor is None else flat.mul_(self._factor)

    def _step_whole(self, group):
        """Has the optimizer step the master weights of a group at once, and writes them into this rank's partition."""
        optimizer = self._optimizer
        master, param_groups = optimizer.single_partition_of_fp32_groups[group], optimizer.optimizer.param_groups
        with timed(optimizer, OPTIMIZER_GRADIENTS_TIMER):
            master.grad = self._take_whole(group)
        try:
            with timed(optimizer, OPTIMIZER_STEP_TIMER):
                optimizer._optimizer_step(group)
        finally:
            # _optimizer_step() hides the other groups, and leaves them hidden if it raises. A checkpoint that is
            # loaded then needs all groups.
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
