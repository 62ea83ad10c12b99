# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The interface of a rule, a way to step the elements of a partition. Parts add rules: ``Feature.rules()``."""

import dataclasses
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional, Protocol, Tuple

import torch

from ..parameter.runs import Runs

if TYPE_CHECKING:
    from .partition_gradient import PartitionGradient


@dataclasses.dataclass(frozen=True)
class Partition:
    """This rank's partition of a parameter group, before a step."""

    optimizer: torch.optim.Optimizer  # the optimizer that the ZeRO-1/2 optimizer wraps
    index: int  # index of the parameter group, whose only parameter is the master weights of the partition
    factor: Optional[torch.Tensor]  # an fp32 tensor [1] with which to multiply gradients, or None for 1
    gradient_dtype: torch.dtype
    # Where the new values of the parameters are written. The gradient may lie there too: read each element before
    # writing it.
    new: Runs
    # Whether nobody has changed the optimizer's step(). Otherwise, no rule may step in its place.
    step_is_unpatched: bool

    @property
    def group(self) -> Dict[str, Any]:
        """The parameter group."""
        return self.optimizer.param_groups[self.index]

    @property
    def master(self) -> torch.nn.Parameter:
        """The master weights, 1-D."""
        return self.group["params"][0]

    @property
    def state(self) -> Dict[str, Any]:
        """The optimizer's state of the master weights, empty before the first step."""
        return self.optimizer.state.get(self.master) or {}


class Step(Protocol):
    """One step of one partition, made range by range, in any order."""

    def prepare(self, gradients: List[Tuple[int, torch.Tensor]]) -> None:
        """Called once, before the host waits to learn whether gradients overflowed. Changes nothing that stays.

        ``gradients``: (offset in the partition, 1-D) of each, ascending, where :meth:`run` finds them.
        """
        return

    def run(self, gradient: "PartitionGradient", first: int, limit: int) -> int:
        """Steps elements from the offset ``first`` on, to ``limit`` at the latest, and writes their new values.

        Takes the gradient of these elements out of that of the partition. Every element is stepped once. Returns the
        offset behind the last element that was stepped, greater than ``first``.
        """

    def finish(self) -> None:
        """Called when all elements are stepped. Writes states that belong to no element, such as the step count."""
        return


class Rule(Protocol):
    """A way to step partitions. Each engine has rules of its own, which may keep data between steps."""

    def begin(self, partition: Partition) -> Optional[Step]:
        """Begins a step of a partition, or returns None if this rule does not serve the partition.

        This may compile code, but changes nothing of the optimizer: an overflow may end the step before its first
        range. A rule must return None unless ``partition.step_is_unpatched``.
        """


def first_step(rules: Iterable[Rule], partition: Partition) -> Optional[Step]:
    """Begins a step of a partition by the first of the rules that serves it. Returns None if none does."""
    steps = (rule.begin(partition) for rule in rules)
    return next((step for step in steps if step is not None), None)
