# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How ranks give each other their shards of parameters. For gradients, see ``csrc/includes/deepcompile_carrier.h``."""

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Protocol, Sequence, Tuple

import torch
from torch.distributed import ProcessGroup, Work
from torch.multiprocessing.reductions import StorageWeakRef

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..collectives import every_rank_raises

# Parameters whose shards have fewer elements are gathered together, so many elements of them at once.
JOINED_NUMEL = 2**17
STAGED_NUMEL = 2**23


class Awaitable(Protocol):
    """Something on its way."""

    def wait(self) -> Any:
        """Makes the current stream wait, and on a CPU the calling thread. May be called several times."""


class Carrier(Protocol):
    """Carries the parameters of one process group."""

    def flat_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Returns memory for a parameter group, of zeros: a tensor [numel] of the dtype and on the device of ``like``.
        All ranks call it."""
        return torch.zeros(numel, dtype=like.dtype, device=like.device)

    def partition(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Does the same for this rank's partition of a parameter group, whose flat tensor will be given up."""
        return self.flat_tensor(numel, like)

    def take_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a flat tensor or a partition that was allocated otherwise, or is on the host, or a copy of it on the
        device, where the carrier can send it from. All ranks call it."""
        return memory

    def flats_have_left(self) -> None:
        """Called when flat tensors have moved to the host: their memory on the device is to be free."""
        return

    def beside(self, process_group: ProcessGroup) -> "Carrier":
        """Returns what gathers shards at times at which the carrier's own process group may have other messages.

        Args:
            process_group: of the same ranks, for collectives if it takes any.
        """

    def before_write(self) -> None:
        """Called on all ranks before a step writes this rank's shards: makes the current stream wait for what earlier
        calls of :meth:`gather` have begun, also where nobody has waited for it."""
        return

    def gather(
        self, memory: torch.Tensor, runs: Sequence[Tuple[int, int]], shards: Optional[Sequence[torch.Tensor]] = None
    ) -> List[Awaitable]:
        """Begins to fill runs of memory with the shards of all ranks, in the order in which they are used.

        Args:
            memory: 1-D. It may be written in the runs alone.
            runs: (first, elements) of each: as many equal shards as there are ranks.
            shards: this rank's, of each run, in a tensor of :meth:`partition`; None: they lie in the runs. They have
                their values, which are ready on the current stream.

        Returns:
            what to wait for, until all runs are filled and the other ranks have read this rank's shards, which may be
            written then. No work of the current stream waits for other ranks.
        """


class Collectives(Carrier):
    """Carries by the process group's all-gather. A rank sends its shards itself, so before it writes them again, the
    stream of the step has sent them."""

    def __init__(self, process_group: ProcessGroup):
        self._group = process_group
        self._rank, self._world = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._side: Any = None  # the stream on which parameters are copied from where they arrive together

    def flat_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        with every_rank_raises("make room for parameters", self._group):
            return super().flat_tensor(numel, like)

    def partition(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        # Its callers compare errors.
        return super().flat_tensor(numel, like)

    def beside(self, process_group: ProcessGroup) -> "Carrier":
        return Collectives(process_group)

    def gather(
        self, memory: torch.Tensor, runs: Sequence[Tuple[int, int]], shards: Optional[Sequence[torch.Tensor]] = None
    ) -> List[Awaitable]:
        # A single rank has nobody to send to.
        if self._world == 1:
            return []
        if shards is None:
            shards = [memory.narrow(0, *run).view(self._world, run[1] // self._world)[self._rank] for run in runs]
        sent = dict(zip(runs, shards, strict=True))
        messages = [
            ([memory.narrow(0, *run) for run in message], [sent[run] for run in message])
            for message in in_messages(runs, self._world)
        ]
        works: List[Awaitable] = [self._gather_joined(*message) for message in messages if len(message[0]) > 1]
        alone = [(run, shard) for (run, *others), (shard, *_) in messages if not others]
        if alone:
            with grouped(self._group, memory.device) as works_of_group:
                for run, shard in alone:
                    works_of_group.append(self._all_gather(run, shard))
            works += works_of_group
        return works

    def _all_gather(self, run, own):
        return dist.all_gather_into_tensor(run, own, group=self._group, async_op=True)

    def _gather_joined(self, runs, shards) -> Awaitable:
        accelerator = get_accelerator()
        if runs[0].is_cpu:
            return _Arrival(*self._send_joined(runs, shards))
        # What is gathered is copied on another stream, so that the current one goes on.
        if self._side is None:
            self._side = accelerator.Stream()
        self._side.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._side):
            _Arrival(*self._send_joined(runs, shards)).wait()
            # Its wait() makes the stream wait that is current then.
            return self._side.record_event()

    def _send_joined(self, runs, shards):
        own = torch.cat(shards)
        staged = own.new_empty(self._world * own.numel())
        work = self._all_gather(staged, own)
        sizes = [run.numel() // self._world for run in runs]
        return work, [run.view(self._world, -1) for run in runs], staged.view(self._world, -1).split(sizes, dim=1)


def in_messages(runs: Sequence[Tuple[int, int]], world: int) -> List[List[Tuple[int, int]]]:
    """Lists the runs that are gathered together, because several have small shards, or one by one. Leaves out empty
    ones."""
    messages: List[List[Tuple[int, int]]] = []
    joined: List[Tuple[int, int]] = []
    for run in runs:
        if run[1] >= JOINED_NUMEL * world:
            messages.append([run])
        elif run[1]:
            if joined and sum(numel for _, numel in joined) + run[1] > STAGED_NUMEL:
                joined = []
            if not joined:
                messages.append(joined)
            joined.append(run)
    return messages


class _Arrival:
    """Parameters that are copied to their places when they have arrived."""

    def __init__(self, work: Work, places: List[torch.Tensor], arrived: Sequence[torch.Tensor]):
        self._work, self._places, self._arrived = work, places, arrived

    def wait(self) -> None:
        self._work.wait()
        if self._places:
            torch._foreach_copy_(self._places, list(self._arrived))
            self._places, self._arrived = [], []


def carrier_of(optimizer: DeepSpeedZeroOptimizer, group: int) -> Carrier:
    """Returns the carrier of a parameter group's process group."""
    carriers, process_group = carriers_of(optimizer), optimizer.real_dp_process_group[group]
    if process_group not in carriers:
        carriers[process_group] = Collectives(process_group)
    return carriers[process_group]


def carriers_of(optimizer: DeepSpeedZeroOptimizer) -> Dict[ProcessGroup, Carrier]:
    """Returns the carriers of an optimizer's process groups, as far as one was asked for or put here."""
    return vars(optimizer).setdefault("carriers", {})


class MappedMemory:
    """The memory of this process that other ranks have mapped, which torch's allocator does not count."""

    def __init__(self) -> None:
        # Weak references, because a tensor may get other memory, and its own memory another tensor.
        self._counted: List[Tuple[StorageWeakRef, int]] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Counts the memory of a tensor as long as the memory lives."""
        alive = [counted for counted in self._counted if not counted[0].expired()]
        self._counted = [*alive, (StorageWeakRef(tensor.untyped_storage()), tensor.nbytes)]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for memory, nbytes in self._counted if not memory.expired())


mapped_memory = MappedMemory()


@contextlib.contextmanager
def grouped(process_group: ProcessGroup, device: torch.device) -> Iterator[List[Work]]:
    """Context that sends asynchronous collectives of one process group as one group, if the backend has groups.

    NCCL starts the collectives of a group with one kernel and runs them side by side. gloo has no groups.

    Yields:
        a list to which the caller appends the collectives' works. After the context, the list holds the works to wait
        for: one of the whole group, or the appended ones.
    """
    works: List[Work] = []
    if not process_group._get_backend(device).supports_coalescing:
        yield works
        return
    process_group._start_coalescing(device)
    try:
        yield works
    finally:
        # If a collective raised, end the group too: an open group would swallow the process group's later collectives.
        works[:] = [process_group._end_coalescing(device)]
