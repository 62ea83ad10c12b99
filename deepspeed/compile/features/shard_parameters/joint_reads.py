# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Reads of sharded parameters outside of forwards and backwards (``compile.shard_parameters``).

Callbacks of trainers read parameters between steps, on all ranks: averages of weights, reference models, exports.
Other code does so on the first rank alone, such as a log of norms. A rank cannot know which of the two its caller
does, and a gather that other ranks do not join hangs. So ranks first meet in the process group's store, where waiting
for others can end: the first rank that writes the decision decides for all, and only then do they gather.
"""

import time

from torch.distributed import ProcessGroup, distributed_c10d

import deepspeed.comm as dist
from deepspeed.utils import logger

# Seconds after which a rank says that it waits for others, and after which it takes itself to be alone.
PATIENCE, LONGEST_WAIT = 10.0, 60.0
# Seconds between two looks into the store: at first, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 0.05
ALL_READ, ALONE = b"all read", b"alone"
AWAITED = (
    "rank {} reads parameter {}, which compile.shard_parameters shards over the ranks, and has waited {:.0f} s, of "
    "{:.0f} s at most, for other ranks to read it too"
)


class JointReads:
    """Says whether all ranks of a process group read the same unit."""

    def __init__(self, process_group: ProcessGroup):
        self._group = process_group
        # Numbers that are equal on all ranks: of steps, and of reads that all ranks agreed to make together.
        self._steps = self._reads = 0
        self._key_before = ""

    def after_step(self) -> None:
        """Called on all ranks after each step. A unit that a rank has read alone may be read by all again."""
        self._steps += 1

    def agree(self, number: int, name: str) -> bool:
        """Returns whether all ranks read a unit now. All of them get the same answer, also those that come late.

        Args:
            number: of the unit, the same on all ranks and no other unit's.
            name: of its parameter, for the line that says that this rank waits.
        """
        # A store of its own would need a free port.
        store = distributed_c10d._get_process_group_store(self._group)
        key = f"read/{number}/{self._steps}/{self._reads}"
        if store.add(f"{key}/ranks", 1) == dist.get_world_size(self._group):
            decided = store.compare_set(key, "", ALL_READ.decode())
            self._forget_one_before(store)
        else:
            decided = self._await(store, key, name)
        if decided != ALL_READ:
            return False
        self._reads += 1
        self._key_before = key
        return True

    def _await(self, store, key, name):
        began, pause, was_said = time.monotonic(), FIRST_PAUSE, False
        # A wait() of the store would keep other threads from it.
        while not store.check([key]):
            seconds = time.monotonic() - began
            if seconds > LONGEST_WAIT:
                return store.compare_set(key, "", ALONE.decode())
            if seconds > PATIENCE and not was_said:
                was_said = True
                # Each rank that waits says it.
                logger.warning(AWAITED.format(dist.get_rank(), name, seconds, LONGEST_WAIT))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return store.get(key)

    def _forget_one_before(self, store):
        """Called when all ranks have come, so that nobody looks for the decision before any more."""
        if self._key_before:
            store.delete_key(self._key_before)
            store.delete_key(f"{self._key_before}/ranks")
