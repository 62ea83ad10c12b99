# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which units are whole on this rank, which may be resharded now, and which must stay (``compile.shard_parameters``).

A unit is in one of these states:

- at rest: this rank has its part;
- replaceable: whole, or on its way, until another unit needs its place, or until it is released;
- in use: as replaceable, and the forward of its block is under way, or a context of ``unsharded_parameters()`` of some
  parameters. It stays until that ends;
- kept: whole, or on its way, until its backward has come. It is replaceable then;
- fixed: all units are, where they stay as they are, whole or at rest: within ``unsharded_parameters()`` of all
  parameters, and for good when the engine has ended or has given its units up.

Unless units are fixed, ``WholeUnits._is_kept`` has those that are whole or on their way, and no others. Of these, no
more than ``MOST_GATHERED`` are replaceable, but where units must stay (in use, or large and outside of blocks), and no
more than ``WholeUnits.most_kept`` are kept. All ranks begin the same units in the same order.
"""

import collections
import contextlib
import time
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Set

import torch

from deepspeed.utils import logger

from ...zero_1_and_2.gradient.backward import in_backward
from ...zero_1_and_2.messages import warn
from .comparison import At
from .unit import Unit

# How many units are replaceable at a time: the one that a block computes with, and the next one, which is on its way.
MOST_GATHERED = 2
EXTERNALLY_VIEWED = (
    "the parameters of a block, parameter {} among them, stay whole on this rank while anyone has a view of "
    "their memory, such as a state dict, a tensor that a forward has kept, or a penalty of parameters whose backward "
    "has not run; drop it, or clone() it, to have them sharded by compile.shard_parameters"
)
STAYS_WHOLE = (
    "compiled code reads a parameter outside of its block's call, where nothing could gather it before, so what is "
    "gathered together, parameter {} among it, stays whole on every rank"
)
AWAITED = (
    "rank {} has waited {:.0f} s for others: with compile.shard_parameters all ranks must save a model, or take its "
    "state dict to save it, together, and rank 0 alone gets the values"
)
PATIENCE = 20.0  # seconds before a rank says that


class WholeUnits:
    """Gathers units, and reshards them when others need their place.

    Args:
        units: all that there are.
        must_stay: (a replaceable unit, the unit that begins) -> whether the former stays beside the latter.

    Attributes:
        most_kept: how many units of blocks stay until their backward, those that began last.
    """

    def __init__(self, units: List[Unit], must_stay: Callable[[Unit, Unit], bool]):
        self._units, self._must_stay = units, must_stay
        self.most_kept = 0
        # The units that are not at rest, in the order in which they began -> whether each is kept.
        self._is_kept: Dict[Unit, bool] = {}
        # How many forwards of a unit's block are under way.
        self._uses: collections.Counter = collections.Counter()
        # Whether the caller was told that others have views of units at rest.
        self._has_warned = False
        # Units that are never at rest again.
        self._whole_for_good: Set[Unit] = set()
        # The number of reasons why units stay as they are.
        self._fixed = 0

    @property
    def are_fixed(self) -> bool:
        return self._fixed > 0

    def begin(self, unit: Unit, is_kept: bool = False, at: Optional[At] = None) -> None:
        """Begins to gather a unit, unless it is whole or on its way. Reshards others for it.

        ``is_kept``: whether the unit stays until its backward. ``at``: as for ``Unit.start_gather()``.
        """
        if self.are_fixed:
            return
        if self._is_kept.get(unit) and in_backward():
            # From now on it is as others, and began last.
            del self._is_kept[unit]
        if is_kept:
            self.release_kept(self.most_kept - 1, besides=unit)
        if unit not in self._is_kept:
            others = [
                other for other, stays in self._is_kept.items() if not stays and other not in self._whole_for_good
            ]
            idle = [other for other in others if not self._uses[other] and not self._must_stay(other, unit)]
            for other in idle[: max(len(others) - MOST_GATHERED + 1, 0)]:
                self.release(other)
            self.free_unviewed()
            self._is_kept[unit] = False
            try:
                unit.start_gather(at)
            except BaseException:
                # A later forward shall raise this error again, and not wait for what never comes.
                del self._is_kept[unit]
                raise
        if is_kept:
            del self._is_kept[unit]
            self._is_kept[unit] = True

    def release(self, unit: Unit) -> None:
        """Called when a pass needs a unit no longer. Reshards it if it is replaceable."""
        if self._is_kept.get(unit):
            # The ranks may have left out the block. They then have the unit, and send it anew after a step.
            unit.finish_gather()
        elif unit in self._is_kept and not self._uses[unit] and not self.are_fixed:
            self._reshard(unit)

    def _reshard(self, unit):
        self._is_kept.pop(unit, None)
        unit.reshard()

    def release_kept(self, most: int = 0, besides: Optional[Unit] = None) -> None:
        """Releases what is kept for a backward, such as what that has not read, but for the ``most`` that began last.

        ``besides``: a unit that stays as it is, and does not count.
        """
        kept = [unit for unit, stays in self._is_kept.items() if stays and unit is not besides]
        for unit in kept[: max(len(kept) - most, 0)]:
            self._is_kept[unit] = False
            self.release(unit)

    @contextlib.contextmanager
    def in_use(self, unit: Unit) -> Iterator[None]:
        """Context in which a unit stays, such as that of a forward of its block."""
        self._uses[unit] += 1
        try:
            yield
        finally:
            self._uses[unit] -= 1

    def keep_whole(self, unit: Unit) -> None:
        """Called on all ranks if compiled code reads a unit where nothing gathers it before. It stays from now on."""
        if unit in self._whole_for_good:
            return
        self._whole_for_good.add(unit)
        self._uses[unit] += 1
        warn(STAYS_WHOLE.format(unit.memory.name))

    @contextlib.contextmanager
    def held(self, units: List[Unit]) -> Iterator[None]:
        """Context in which these units are whole. All ranks enter it. Changes of parameters stay."""
        with contextlib.ExitStack() as stack:
            for unit in units:
                stack.callback(self.release, unit)
                stack.enter_context(self.in_use(unit))
                self.begin(unit)
                unit.finish_gather()
                unit.is_used = True
            yield

    # Memory that others have ---------------------------------------------------------------------------------------

    def free_unviewed(self) -> None:
        """Frees memory of units at rest that others have had until now."""
        for unit in self._units:
            if unit.memory.has_external_views and unit.is_at_rest:
                unit.memory.free()

    def warn_of_external_views(self) -> None:
        """Tells the caller, once, if others have memory that could be freed."""
        self.free_unviewed()
        viewed = [unit for unit in self._units if unit.memory.has_external_views and unit.is_at_rest]
        if viewed and not self._has_warned:
            self._has_warned = True
            warn(EXTERNALLY_VIEWED.format(viewed[0].memory.name))

    # All units -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def fixed(self) -> Iterator[None]:
        """Context in which all units are whole. All ranks enter it. Changes of parameters stay."""
        if not self.are_fixed:
            self._gather_all()
        self._fixed += 1
        try:
            yield
        finally:
            self._fixed -= 1
            if not self.are_fixed:
                for unit in self._units:
                    unit.is_used = True
                    if not self._uses[unit]:
                        self._reshard(unit)

    def give_up(self) -> None:
        """Gathers all units for good. All ranks call it."""
        self._gather_all()
        self.leave_as_they_are()

    def leave_as_they_are(self) -> None:
        """Units stay as they are for good: whole within :meth:`fixed`, else at rest."""
        self._fixed += 1

    def _gather_all(self):
        for unit in self._units:
            unit.start_gather()
            unit.finish_gather()

    def one_by_one(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Yields each of the units when it is whole, and has no other one whole for that. All ranks call this."""
        for unit in units:
            if unit.is_gathered and (self.are_fixed or self._uses[unit]):
                yield unit
                continue
            if unit.is_at_rest:
                # The gather begins with this, which says whether the other ranks come.
                unit.comparison.start()
            _await_others(unit)
            unit.start_gather()
            unit.finish_gather()
            try:
                yield unit
            finally:
                self._reshard(unit)


def _await_others(unit):
    """Says so if ranks that must gather a unit with this one do not come."""
    until = time.monotonic() + PATIENCE
    while not unit.comparison.is_completed():
        if time.monotonic() > until:
            # Each rank that waits says it.
            logger.warning(AWAITED.format(torch.distributed.get_rank(), PATIENCE))
            return
        time.sleep(0.001)
