# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""All ranks keep the same units, though each comes back to other blocks."""

import types

import pytest

from deepspeed.compile.features.shard_parameters.gather_order import GatherOrder
from deepspeed.compile.features.shard_parameters.whole_units import WholeUnits


class Gathered:
    """Stands for a unit: has what its owner asks of one, and says when it is gathered."""

    memory = types.SimpleNamespace(is_lent=False)

    def __init__(self, name, log):
        self.name, self._log = name, log

    def start_gather(self, evaluates):
        self._log.append(f"gather {self.name}")

    def finish_gather(self):
        pass

    def reshard(self):
        self._log.append(f"reshard {self.name}")


def messages(called):
    """Returns what a rank does that calls these of four blocks in a forward, and then another block by itself."""
    log = []
    units = [Gathered(number, log) for number in range(5)]
    whole = WholeUnits(units, lambda *_: False)
    whole.most_kept = 2
    for order, blocks in ((GatherOrder(whole, units[:4]), called), (GatherOrder(whole, units[4:]), [4])):
        order.keep(whole.most_kept)
        for block in blocks:
            order.reach(units[block])
        order.end()
    return log


@pytest.mark.quick
def test_ranks_that_come_back_to_a_block_keep_the_same():
    """Ranks would gather different blocks in the backward, and wait for each other."""
    log = messages([2, 3, 2])
    assert log == messages([2, 3]) == messages([])
    # The one that goes makes room for the one that comes.
    assert log.index("reshard 2") < log.index("gather 4") and "reshard 3" not in log
