# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps ranges of a partition, or all of it at once, by the optimizer's own ``step()``."""

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .authors import hooks_of_torch
from .partition_gradient import PartitionGradient
from .ranges import end_of_range
from .rule import Partition

# Optimizers that treat each element by itself.
_ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.SGD, FusedAdam),
    DeepSpeedCPUAdam,
)


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


class OwnStep:
    """One ``Step`` of one partition by an optimizer that treats each element by itself: it steps range by range."""

    def __init__(self, partition: Partition):
        self._partition, self._optimizer, self._new = partition, partition.optimizer, partition.new
        self._whole, self._state = partition.master, partition.state
        # In the first step, the optimizer makes the state of each range.
        self._is_new = not self._state
        # States and settings that belong to no element. Each range counts the step, so the last range's are right.
        self._scalars: Dict[str, Any] = {}
        self._settings: Dict[str, Any] = {}

    def prepare(self, gradients: List[Tuple[int, torch.Tensor]]) -> None:
        """Does nothing."""

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
            self._partition.keep_state(self._state)
        self._partition.group.update(self._settings)


def _part(value, parameter, first, last):
    if is_per_element(value, parameter):
        return value[first:last]
    return value.clone() if torch.is_tensor(value) else value


class WholeStep:
    """One ``Step`` of one partition as one range, by the optimizer itself, for a partition that no rule serves.

    Its optimizer reads more than one element at a time, or somebody has replaced ``step()``.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, group: int):
        self._optimizer, self._group = optimizer, group

    def prepare(self, gradients: List[Tuple[int, torch.Tensor]]) -> None:
        """Does nothing."""

    def run(self, gradient: PartitionGradient, first: int, limit: int) -> int:
        optimizer, inner = self._optimizer, self._optimizer.optimizer
        master = optimizer.single_partition_of_fp32_groups[self._group]
        master.grad = gradient.scaled(first, limit)
        # Keep no reference to the gradient, which the optimizer may drop.
        gradient.drop()
        try:
            # The base's method leaves only this group in `param_groups` if the step raises: put all groups back.
            with with_groups(inner, inner.param_groups):
                optimizer._optimizer_step(self._group)
        finally:
            master.grad = None
        optimizer._deepcompile.placement.new_parameters(optimizer, self._group).write(0, master.data)
        return limit

    def finish(self) -> None:
        """Does nothing: the optimizer has written all states."""


@contextlib.contextmanager
def with_groups(inner: torch.optim.Optimizer, param_groups: List[Dict[str, Any]]) -> Iterator[None]:
    """Context in which an optimizer has these parameter groups. Its own groups come back at the end."""
    before = inner.param_groups
    try:
        inner.param_groups = param_groups
        yield
    finally:
        inner.param_groups = before
