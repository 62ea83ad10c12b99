# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The order in which the units of blocks are gathered (``compile.shard_parameters``).

A call of a module that calls blocks is a pass. A pass gathers the units of its blocks, and of large trained layers
beside them, in the order of the model, and the backward through the pass gathers them in the reverse order, each once,
on every rank: a rank that skips a block gathers its unit too, because other ranks need this rank's part, and reshards
it at once. So ranks may skip different blocks. The backward leaves out the frozen blocks into which no gradient flows.
A unit that was resharded and is needed again within a pass is gathered once more, out of order. That happens if a pass
comes back to an earlier block, if the model registers a layer in another place than it calls it, or if checkpointing
spans several blocks. All ranks must then do the same. The unit that somebody has just reached stays whatever is
gathered next.
"""

import itertools
from typing import Any, Container, Iterator, List, Optional, Set

import torch
from torch.utils._pytree import tree_leaves

from .private_torch import in_backward
from .unit import Unit
from .whole_units import WholeUnits

_numbers = itertools.count()


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
        number: a later pass has a larger one.
    """

    def __init__(
        self,
        whole: WholeUnits,
        units: List[Unit],
        needed_from: int = 0,
        is_of_block: bool = False,
        forward: Optional["GatherOrder"] = None,
    ):
        self.units, self.is_of_block, self.number = units, is_of_block, next(_numbers)
        self._whole = whole
        self._forward = forward
        self._needed_from = needed_from
        self._has_block_run = self._is_seen = False
        # A backward takes this from its forward, because a rank that skips blocks gathers them behind the backward.
        self._evaluates: bool = forward._evaluates if forward else not (torch.is_grad_enabled() or in_backward())
        self._place = {unit: place for place, unit in enumerate(units)}
        # The units that stay until their backward.
        self._kept: Set[Unit] = set()
        # How many units this pass has begun to gather.
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

    def note_inputs(self, inputs: Any) -> None:
        """Called with the inputs of each block in a forward.

        Ranks that skip different blocks must gather the same units in the backward. A gradient that flows on into
        what is before the blocks does so through the first block that a rank runs, whichever that is.
        """
        if not self._has_block_run:
            self._has_block_run = True
            if any(tensor.requires_grad for tensor in tensors_in(inputs)):
                self._needed_from = 0

    def note_gradient(self, unit: Optional[Unit]) -> None:
        """Called if a gradient flows through a block that reads this unit for it, or through the whole pass (None)."""
        self._is_seen = True
        if unit is not None:
            self._needed_from = min(self._needed_from, self._place[unit])
        elif not self._has_block_run:
            self._needed_from = 0

    def note_output(self, from_inputs: bool) -> None:
        """Called if a backward comes to this pass, or is taken to, in which this rank has run no block.

        The backward flows on as on other ranks.

        ``from_inputs``: whether an input of the pass needs a gradient.
        """
        self._is_seen = True
        if from_inputs:
            self._needed_from = 0

    @property
    def is_unseen(self) -> bool:
        """Whether no backward comes to this pass on this rank, where one may come on ranks that run other blocks.

        A rank that runs frozen blocks alone, of an input without gradient, records nothing.
        """
        may_differ = not self._has_block_run or self._needed_from < len(self.units)
        return bool(self.units) and may_differ and not self._is_seen

    def reach(self, unit: Unit) -> None:
        """Gathers a unit, and begins to gather the one behind it."""
        place = self._place[unit]
        while self._begun <= place:
            self._begin_next()
        # Starts it once more if it was resharded. What is kept is so since it began, in the same order on all ranks,
        # which may come back to a block or not.
        self._whole.begin(unit, evaluates=self._evaluates)
        unit.finish_gather()
        if self._begun == place + 1 < len(self.units):
            # The caller is about to read this unit, which may have begun before all others: the next one takes the
            # place of another one.
            with self._whole.in_use(unit):
                self._begin_next()

    def _begin_next(self):
        unit = self.units[self._begun]
        self._whole.begin(unit, unit in self._kept, self._evaluates)
        self._begun += 1

    def end(self) -> None:
        """Gathers the units that this rank did not need, for the other ranks, and releases all units."""
        while self._begun < len(self.units):
            self._begin_next()
        for unit in self.units:
            self._whole.release(unit)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of inputs or of an output, also those of objects that torch does not know."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in tree_leaves(vars(leaf)) if isinstance(value, torch.Tensor))
