# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps ranges of a partition by the optimizer's own ``step()``."""

from typing import Any, Dict, Optional

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from ...zero_1_and_2.step.authors import hooks_of_torch
from ...zero_1_and_2.step.partition_gradient import PartitionGradient
from ...zero_1_and_2.step.partitions import with_groups
from ...zero_1_and_2.step.rule import Partition, Step

# Elements of a range: 512 MiB of fp32. Kernels over so many elements run at the memory's full speed.
RANGE_NUMEL = 2**27
# On the host 24 MiB: the next pass finds most of a range in the processor's cache, and the C library asks the system
# for each allocation above 32 MiB. With shorter ranges, the threads of each pass would take too long to start.
RANGE_NUMEL_ON_HOST = 3 * 2**21
# Optimizers that treat each element by itself.
_ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.SGD, FusedAdam),
    DeepSpeedCPUAdam,
)


def end_of_range(master: torch.Tensor, first: int, limit: int) -> int:
    """Returns the end of the range that begins at ``first``: as many elements as are stepped at once."""
    return min(first + (RANGE_NUMEL_ON_HOST if master.is_cpu else RANGE_NUMEL), limit)


def keep_state(partition: Partition, state: Dict[str, Any]) -> None:
    """Makes ``state`` the optimizer's state of the master weights."""
    partition.optimizer.state[partition.master] = state


def may_be_cut(partition: Partition) -> bool:
    """Whether steps of a partition's ranges give the result of one step, by the optimizer or otherwise."""
    # The first step makes the state. A later step makes an entry that is still None, if an option now asks for it.
    return type(partition.optimizer) in _ELEMENTWISE and all(
        is_per_element(value, partition.master)
        or (value.numel() == 1 if torch.is_tensor(value) else value is not None)
        for value in partition.state.values()
    )


def is_per_element(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state of an optimizer has a value for each element of a parameter."""
    return torch.is_tensor(value) and value.shape == parameter.shape


class OwnRanges:
    """The rule that makes the optimizer itself step ranges."""

    def begin(self, partition: Partition) -> Optional["OwnStep"]:
        # Torch's hooks would count each range as a step.
        cuts = partition.step_is_unpatched and may_be_cut(partition) and not hooks_of_torch()
        return OwnStep(partition) if cuts else None


class OwnStep(Step):
    """One ``Step`` of one partition by an optimizer that treats each element by itself: it steps range by range."""

    def __init__(self, partition: Partition):
        self._partition, self._optimizer, self._new = partition, partition.optimizer, partition.new
        self._whole, self._state = partition.master, partition.state
        # In the first step, the optimizer makes the state of each range.
        self._is_new = not self._state
        # States and settings that belong to no element. Each range counts the step, so the last range's are right.
        self._scalars: Dict[str, Any] = {}
        self._settings: Dict[str, Any] = {}

    def run(self, gradient: PartitionGradient, first: int, limit: int) -> int:
        last = end_of_range(self._whole, first, limit)
        optimizer = self._optimizer
        part = torch.nn.Parameter(self._whole.data[first:last])
        part.grad = gradient.scaled(first, last)
        group = {**self._partition.group, "params": [part]}
        state = {name: _part(value, self._whole, first, last) for name, value in self._state.items()}
        try:
            if not self._is_new:
                optimizer.state[part] = state
            with with_groups(optimizer, [group]):
                optimizer.step()
        finally:
            state = optimizer.state.pop(part, {})
        self._keep(state, group, first, last)
        self._new.write(first, part.data)
        return last

    def _keep(self, state, group, first, last):
        """Keeps the new states of a range, but no tensor of a range's size while the next range is stepped."""
        self._settings = {name: value for name, value in group.items() if name != "params"}
        self._scalars = {name: value for name, value in state.items() if not is_per_element(value, *group["params"])}
        for name, value in state.items():
            if not self._is_new or name in self._scalars:
                continue
            if value.shape == self._whole.shape:
                self._state[name] = value
                continue
            if name not in self._state:
                self._state[name] = value.new_empty(self._whole.shape)
            self._state[name][first:last] = value

    def finish(self) -> None:
        for name, value in self._scalars.items():
            if torch.is_tensor(self._state.get(name)):
                self._state[name].copy_(value)
            else:
                self._state[name] = value
        if self._state:
            keep_state(self._partition, self._state)
        self._partition.group.update(self._settings)


def _part(value, parameter, first, last):
    if is_per_element(value, parameter):
        return value[first:last]
    return value.clone() if torch.is_tensor(value) else value
