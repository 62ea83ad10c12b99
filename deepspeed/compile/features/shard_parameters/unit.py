# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A unit: parameters that are gathered together before they are used. Each rank keeps a part of them.

``unit_memory.py`` says where they lie. What autograd has saved of them are handles (``saved_tensors.py``).
"""

import time
import weakref
from typing import Any, Callable, List, Optional

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.collectives import collective, every_rank_raises
from .at_rest import ENDED, keep_unit, mark_resharded, unmark
from .comparison import PURPOSE, At, Comparison
from .unit_memory import UnitMemory

# A thread of gloo's may hold the memory of a finished gather this long after wait(). Only a busy machine takes longer.
LONGEST_HELD = 1.0  # seconds
TAKE_IN = "shard parameters"


class Unit:
    """Parameters that the ranks gather together.

    Args:
        memory: of the parameters.
        process_group: the ranks that share them. It must carry nothing else: other collectives come at other times on
            different ranks, and a process group matches messages by their order alone.
        device: on which the unit is gathered.
        number: of the unit, the same on all ranks and no other unit's, also of other engines.
        name: of the unit, for errors.

    Attributes:
        comparison: of the unit's number among ranks, when a gather starts.
        is_used: whether code that may change the parameters has run since the unit was gathered.
        owner: the ``ShardParameters`` that reshards and gathers the unit. Without one, it stays whole.
    """

    def __init__(self, memory: UnitMemory, process_group: ProcessGroup, device: torch.device, number: int, name: str):
        self.memory, self._group, self._device = memory, process_group, device
        for slot in memory.slots():
            slot.unit = weakref.ref(self)
        self.comparison = Comparison(number, name, process_group, device)
        self._target: Any = None  # of a gather
        self._works: Optional[List[Any]] = None  # of the gather that nobody has waited for
        self._readers: List[Any] = []  # streams that have waited for the gather
        self.owner: Any = None
        self.is_gathered = True
        # This rank's shards have no values yet.
        self.is_used = True
        # Whether trained parameters have been gathered once: those cut from the host have no values here before.
        self._has_trained = False

    def take_in(self, before: Callable[[], None]) -> None:
        """Moves the parameters into the unit's memory. ``before()`` is called first.

        DeepSpeed has not broadcast parameters that were on the host. Frozen ones get the first rank's values here.
        """
        # Before the broadcast, in which the other ranks would wait for one that raised.
        with every_rank_raises(TAKE_IN, self._group):
            before()
            lack_values = self.memory.take_in()
        if lack_values:
            with collective(PURPOSE):
                frozen = self.memory.frozen.memory(self.memory.buffer)
                dist.broadcast(frozen, src=dist.get_global_rank(self._group, 0), group=self._group)

    @property
    def is_at_rest(self) -> bool:
        """Whether this rank has its part, and nothing is on its way. The memory may stay for those who view it."""
        return not self.is_gathered and self._works is None

    # Gathered and resharded ----------------------------------------------------------------------------------------

    def start_gather(self, at: Optional[At] = None) -> None:
        """Starts to gather the unit. All ranks must start the same units in the same order.

        ``at``: the block that was reached, which ranks compare, if this unit is the next one.
        """
        if self.is_at_rest:
            self._send(self.memory.allocate_target(), at)

    def _send(self, target, at=None, sends_frozen=True):
        self._target = target
        memory, works = self.memory, []
        # First, because parts of different units may differ in size.
        self.comparison.start(at)
        if self._device.type == "cpu":
            # Gloo ends a process that gets a message of another size than it waits for.
            self.comparison.wait()
        with collective(PURPOSE):
            if sends_frozen:
                works += memory.frozen.gather(target)
            for segment in memory.trained:
                # Memory that others have may hold values from before a step.
                works += segment.gather(memory.buffer)
        self._works = works

    def refresh(self) -> None:
        """Called on all ranks when partitions hold new values of the trained parameters."""
        self.memory.external_views_are_current = False
        if not self.memory.trained or self.is_at_rest:
            return
        if not self.is_gathered:
            # What is on its way has the values of before.
            self.finish_gather()
        self._readers = [self._wait_for_readers()]
        self.memory.take_trained_back()
        # Frozen ones may have been changed here since they were gathered.
        self._send(self.memory.buffer, sends_frozen=False)
        # Nobody gives the memory back now, and a caller may keep views of it, such as a state dict.
        self._wait(until_free=False)
        self._has_trained = True
        self.memory.note_versions(of_frozen=False)

    def take_changes(self) -> None:
        """Called before others read this rank's partitions: takes over what a caller has changed in place."""
        if self.is_at_rest and self.memory.external_views_are_current:
            self.memory.keep_own_part(trained_too=True)
        # A change by `parameter.data` has no version.
        elif self.is_gathered and self._has_trained and (self.is_used or self.memory.are_changed()):
            self.finish_gather()
            # Another stream may still change parameters, or copy earlier changes into this rank's shards.
            self._wait_for_readers()
            self.memory.take_back()
            self.memory.keep_own_part(trained_too=True)
            self.memory.note_versions()

    def _wait_for_readers(self):
        """Makes the current stream wait for all that use the unit. Returns it."""
        stream = get_accelerator().current_stream()
        for reader in self._readers:
            if reader != stream:
                stream.wait_stream(reader)
        return stream

    def finish_gather(self) -> None:
        """Makes the current stream, and on a CPU the calling thread, wait until the unit is gathered."""
        if not self.memory.is_shared:
            return
        stream = get_accelerator().current_stream()
        if not self.is_gathered:
            if self._works is None:
                # Whoever finishes a gather has begun it, unless the engine has ended and begins none.
                raise RuntimeError(ENDED.format(self.memory.name))
            self._wait()
            for _, parameter in self.memory.parameters():
                unmark(parameter)
            self.is_gathered = self._has_trained = True
            self._readers = [stream]
            self.memory.note_versions()
            self.memory.note_holders()
        elif stream in self._readers:
            return
        else:
            stream.wait_stream(self._readers[0])
            self._readers.append(stream)
        self.memory.note_reader(stream)

    def _wait(self, until_free=True):
        """Waits for a gather that was started.

        ``until_free``: whether also, on a CPU, until gloo's thread has let go of the unit's memory, so that whoever
        has a view of it then is a caller.
        """
        if self._works is None:
            return
        self.comparison.wait()
        with collective(PURPOSE):
            # No variable keeps a collective, which keeps the memory. One that failed stays, so that every later wait
            # raises too.
            while self._works:
                self._works[-1].wait()
                self._works.pop()
        if not self._target.is_cpu:
            # Only this stream waits for the gather, which writes into memory of the stream that began it.
            self._target.record_stream(get_accelerator().current_stream())
        is_by_thread = until_free and self._target is self.memory.buffer and self._target.is_cpu
        self._works = self._target = None
        if is_by_thread:
            # Gloo says that the gather is done a moment before its thread lets go of the memory. Until then, free()
            # would take the thread for someone who has a view.
            until = time.monotonic() + LONGEST_HELD
            while self.memory.others_have_views() and time.monotonic() < until:
                time.sleep(0.0001)

    def reshard(self) -> None:
        """Frees the memory of the unit. What this stream was told to compute with it is computed before.

        The values that the parameters have now are kept. A parameter that has another dtype or shape leaves the unit.
        """
        if not self.memory.is_shared:
            return
        # A gather that is on its way still writes.
        self._wait()
        if self.is_gathered:
            # A backward that ran on another stream than its caller's ends on the caller's.
            stream = self._wait_for_readers()
            are_moved = self.memory.take_back()
            if are_moved or self.is_used or self.memory.are_changed():
                self.memory.keep_own_part(trained_too=self._has_trained)
                # The copies read the memory after it is freed for the stream that allocated it.
                self.memory.note_reader(stream)
            for name, parameter in self.memory.parameters():
                mark_resharded(parameter, name, self)
        self.is_gathered = self.is_used = False
        self.memory.free()
        self.memory.external_views_are_current = self.memory.has_external_views and self._has_trained

    def keep(self) -> None:
        """Keeps the unit, and the owner that gathers it, alive as long as parameters at rest live."""
        for _, parameter in self.memory.parameters():
            keep_unit(parameter, self)

    def gather_for_backward(self, schedule: Any = None) -> None:
        """Called when a backward reads the unit. ``schedule``: the pass that saved what the backward reads."""
        self.owner.passes.gather_for_backward(self, schedule)
        if self.is_at_rest:
            raise RuntimeError(
                f"the engine was destroyed before this backward, which needs parameter {self.memory.name}; run the "
                "backward before destroy(), or the forward again with another engine of the model"
            )
        self.finish_gather()
