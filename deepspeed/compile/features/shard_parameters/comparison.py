# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they do next, and those that differ end in a sentence."""

import contextlib
import functools
from typing import Any, ContextManager, Dict, NamedTuple, Optional

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.collectives import collective

PURPOSE = "gather sharded parameters"
# More than an engine has, of units and of places at which it compares.
UNIT_ID_STRIDE = 2**16
# An assertion on a GPU takes no message of 255 bytes.
DIFFERENT = (
    "ranks gathered parameters of different blocks, this one at {}: with compile.shard_parameters all ranks call the "
    "same blocks (if need be on zeros, and multiply the output by 0), or use unsharded_parameters(engine)"
)
LONGEST_NAME = 40


class At(NamedTuple):
    """Where a rank is that gathers."""

    number: int  # of the block, or of another place: the same on all ranks
    name: str
    evaluates: bool = False  # in a forward without gradients, which gathers as one in training does

    def different(self) -> str:
        """Returns what a rank says here if others are elsewhere."""
        return DIFFERENT.format(self.name[-LONGEST_NAME:])


# Where a rank is that compares and gathers nothing. Units have later numbers.
NO_BLOCK, BEGINNING, END = At(0, "no block"), At(1, "the beginning of a backward"), At(2, "the end of a backward")
FIRST_OF_UNITS = 3


@functools.cache
def _own_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def _on_own_stream(device: torch.device) -> ContextManager:
    """Context of the stream of a device's comparisons, which waits for nothing that the device computes.

    The process group's own stream still does, where collectives carry parameters.
    """
    return contextlib.nullcontext() if device.type == "cpu" else get_accelerator().stream(_own_stream(device))


class Comparison:
    """Compares a number between ranks, so that ranks that took different ways raise before they mix up their messages.

    Args:
        number: of what all ranks do next. It begins with the engine's number, and is unique below ``UNIT_ID_STRIDE``.
        name: of what all ranks do next.
        process_group, device: as for :class:`Unit`.

    Attributes:
        at: where this rank is unless :meth:`start` says otherwise.
    """

    def __init__(self, number: int, name: str, process_group: ProcessGroup, device: torch.device):
        self.number, self._group, self._device = number, process_group, device
        self._at = self.at = At(number % UNIT_ID_STRIDE, name)
        # The host sends nothing to a GPU for each comparison.
        self._made: Dict[At, torch.Tensor] = {}
        # The comparison that was started last: the largest number of any rank, the largest negated one, and the
        # collective.
        self._numbers: Any = None
        self._work: Any = None

    def start(self, at: Optional[At] = None) -> None:
        """Starts to send this rank's number, unless that was started and nobody has waited for it.

        ``at``: the block that was reached, if this is for the next one.
        """
        if self._work is not None:
            return
        self._at = at or self.at
        # The current stream may wait for gradients of another rank, whose stream waits for this rank's number.
        with collective(PURPOSE), _on_own_stream(self._device):
            if self._at not in self._made:
                number = 2 * (UNIT_ID_STRIDE * self.number + self._at.number) + self._at.evaluates
                self._made[self._at] = torch.tensor([number, -number], device=self._device)
            # Other memory each time: another stream may still compare what an earlier collective brought.
            self._numbers = self._made[self._at].clone()
            self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def is_completed(self) -> bool:
        """Whether all ranks have sent their numbers."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Makes the current stream, and on a CPU the calling thread, wait for the numbers of the other ranks.

        Raises:
            DistBackendError: on a CPU, if these differ. On a GPU the host does not wait, so the GPU asserts
                that they do not.
        """
        if self._work is None:
            return
        with collective(PURPOSE):
            self._work.wait()
        if not self._numbers.is_cpu:
            # The memory belongs to another stream.
            self._numbers.record_stream(get_accelerator().current_stream())
        # The largest number is the least one.
        same = self._numbers.sum() == 0
        if same.is_cpu and not same:
            # Every later wait raises too.
            raise torch.distributed.DistBackendError(self._at.different())
        self._work = None
        # Public functions such as torch.testing read the condition on the host, which would wait in each block.
        torch._assert_async(same, self._at.different())
