# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The order in which the units of blocks are gathered (``compile.shard_parameters``).

A call of a module that calls blocks is a pass. A pass gathers the unit of a block that is called, or of a large
trained layer beside blocks, and begins to gather the next one in the order of the model. The backward through the pass
does so in the reverse order, and leaves out the frozen blocks that no gradient reaches. All ranks call the same
blocks, and may leave out the same ones: with each gather ranks compare which block they have reached
(``comparison.py``), and at the end of a pass which one they have reached last. A unit that was resharded and is needed
again within a pass is gathered once more, out of order. That happens if a pass comes back to an earlier block, if the
model registers a layer in another place than it calls it, or if checkpointing spans several blocks. The unit that
somebody has just reached stays whatever is gathered next.
"""

from typing import Container, List, Optional, Set

import torch

from ...zero_1_and_2.gradient.backward import in_backward
from .comparison import NO_BLOCK
from .unit import Unit
from .whole_units import WholeUnits


class GatherOrder:
    """The order in which a pass, or a backward through it, gathers units.

    Args:
        whole: gathers and reshards units.
        units: the units, in this order.
        is_of_block: whether somebody calls a block by itself, and no module that calls blocks.
        needed_from: the place of the first unit whose block, or a block before it, has a trained parameter. The
            backward ends there unless a gradient flows on into what is before the blocks.
        forward: None, or the pass through which this backward goes.

    Attributes:
        at: the block that was reached last, which ranks compare.
    """

    def __init__(
        self,
        whole: WholeUnits,
        units: List[Unit],
        needed_from: int = 0,
        is_of_block: bool = False,
        forward: Optional["GatherOrder"] = None,
    ):
        self.units, self.is_of_block = units, is_of_block
        self._whole = whole
        self._forward = forward
        self._needed_from = needed_from
        self._evaluates = not (torch.is_grad_enabled() or in_backward())
        self.at = NO_BLOCK._replace(evaluates=self._evaluates)
        self._place = {unit: place for place, unit in enumerate(units)}
        # The units that stay until their backward.
        self._kept: Set[Unit] = set()
        # The place behind the last unit that this pass has begun to gather.
        self._begun = 0

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._place

    @property
    def forward(self) -> "GatherOrder":
        """The pass itself, or the one through which this backward goes."""
        return self._forward or self

    def reversed(self) -> "GatherOrder":
        """Returns the order of the backward."""
        return GatherOrder(self._whole, self.units[self._needed_from :][::-1], forward=self)

    def keep(self, most: int, outside: Container[Unit] = ()) -> None:
        """Called when a forward begins to which a backward may come.

        So many units of blocks, the last ones, stay until then. ``outside``: has the units of none.
        """
        of_blocks = [unit for unit in self.units if unit not in outside]
        self._kept = set(of_blocks[max(len(of_blocks) - most, 0) :])

    def note_gradient(self, unit: Unit) -> None:
        """Called if autograd saves a tensor of this unit, so that a gradient flows through what reads the unit."""
        self._needed_from = min(self._needed_from, self._place[unit])

    def reach(self, unit: Unit) -> None:
        """Gathers a unit, and begins to gather the one behind it."""
        place = self._place[unit]
        self.at = unit.comparison.at._replace(evaluates=self._evaluates)
        # Starts it once more if it was resharded.
        self._whole.begin(unit, unit in self._kept, self.at)
        self._begun = max(self._begun, place + 1)
        unit.finish_gather()
        if self._begun == place + 1 < len(self.units):
            # The caller is about to read this unit, which may have begun before all others: the next one takes the
            # place of another one.
            with self._whole.in_use(unit):
                following = self.units[self._begun]
                self._whole.begin(following, following in self._kept, self.at)
                self._begun += 1

    def end(self) -> None:
        """Releases all units."""
        for unit in self.units:
            self._whole.release(unit)
