# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they do next, and those that differ end in a sentence."""

from typing import TYPE_CHECKING, Any

import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.collectives import collective
from .private_torch import assert_later

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PURPOSE = "gather sharded parameters"
DIFFERENT = (
    "ranks gathered parameters of different blocks, or one evaluated or began a backward alone: with "
    "compile.shard_parameters all ranks run the same forwards and backwards; for one rank alone, all ranks enter "
    "unsharded_parameters(engine)"
)


class Comparison:
    """Has ranks compare a number, so that ranks that go other ways end before they take what the others send.

    Args:
        number: of what all ranks do next.
        process_group, device: as for :class:`Unit`.

    Attributes:
        number: as above.
    """

    def __init__(self, number: int, process_group: "ProcessGroup", device: torch.device):
        self.number, self._group = number, process_group
        # Of what records gradients, and of what does not. The host sends nothing to a GPU for each comparison.
        self._of_kinds = [torch.tensor([2 * number + kind], device=device) for kind in (False, True)]
        self._world = dist.get_world_size(process_group)
        # Of the comparison that was started last: this rank's number, those of all ranks, and the collective.
        self._number = self._of_kinds[False]
        self._numbers: Any = None
        self._work: Any = None

    def start(self, evaluates: bool = False) -> None:
        """Starts to send this rank's number, unless that was started and nobody has waited for it.

        Args:
            evaluates: whether this is for a forward without gradients. Its units are those of a forward in training,
                in the same order, so another rank that trains would come to know of it only in the backward.
        """
        if self._work is not None:
            return
        self._number = self._of_kinds[evaluates]
        # Other memory each time: another stream may still compare what an earlier collective brought.
        self._numbers = self._number.new_empty(self._world)
        self._work = dist.all_gather_into_tensor(self._numbers, self._number, group=self._group, async_op=True)

    def is_completed(self) -> bool:
        """Whether all ranks have sent their numbers."""
        return self._work is None or self._work.is_completed()

    def wait_on_cpu(self) -> None:
        """As :meth:`wait` on a CPU: gloo ends a process that gets a message of another size than it waits for."""
        if self._numbers.is_cpu:
            self.wait()

    def wait(self) -> None:
        """Makes the current stream, and on a CPU the calling thread, wait for the numbers of the other ranks.

        Raises:
            DistBackendError: on a CPU, if these differ. On a GPU, for which the host does not wait, the GPU asserts
                that they do not.
        """
        if self._work is None:
            return
        with collective(PURPOSE):
            self._work.wait()
        if not self._numbers.is_cpu:
            # The memory belongs to the stream that was current in start().
            self._numbers.record_stream(get_accelerator().current_stream())
        same = (self._numbers == self._number).all()
        if same.is_cpu and not same:
            # Every later wait raises too.
            raise torch.distributed.DistBackendError(DIFFERENT)
        self._work = None
        assert_later(same, DIFFERENT)
