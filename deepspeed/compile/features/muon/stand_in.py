# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The rule that lets other rules step Muon's partitions."""

import dataclasses
from typing import List, Optional, Tuple

import torch

from ...zero_1_and_2.step.rule import Partition, Rule, Step, first_step
from .muon import is_muon


class StandIn:
    """Gives the other rules a partition whose optimizer treats each element by itself."""

    def __init__(self, others: List[Rule]):
        self._others = others

    def begin(self, partition: Partition) -> Optional[Step]:
        if partition.step_is_unpatched:
            optimizer, index = stand_in(partition.optimizer, partition.index)
            partition = dataclasses.replace(partition, optimizer=optimizer, index=index)
        return first_step(self._others, partition)


def stand_in(inner: torch.optim.Optimizer, index: int) -> Tuple[torch.optim.Optimizer, int]:
    """Returns an optimizer that steps a parameter group element by element, and the group's index there.

    This is the optimizer itself, unless it is DeepSpeed's Muon. Muon steps an update as SGD steps a gradient. Muon
    steps its other groups by an Adam, which this call makes share Muon's groups and states.
    """
    if not is_muon(inner):
        return inner, index
    groups = inner.param_groups
    if groups[index]["use_muon"]:
        names = ("params", "lr", "weight_decay")
        return torch.optim.SGD([{name: group[name] for name in names} for group in groups]), index
    adam = inner.aux_optimizer  # type: ignore[attr-defined]
    if adam is None:
        return inner, index
    # Share both again, as Muon's own step does: a load replaces them.
    adam.state, adam.param_groups = inner.state, [group for group in groups if not group["use_muon"]]
    return adam, sum(not group["use_muon"] for group in groups[:index])
