# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Distributes the new values of parameters after a ZeRO-1/2 step, in which each rank stepped its own partition."""

import weakref
from typing import Container, List, Optional, Sequence, Tuple

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..collectives import collective
from ..layout import layouts_of
from .carrier import Awaitable, carrier_of, carriers_of

PURPOSE = "get the parameters that other ranks have stepped"


class AllGather:
    """Gathers all parameters at once, before the step returns."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer):
        self._optimizer = weakref.ref(optimizer)

    def before_step(self) -> None:
        """Called on every rank when a step begins, before it makes views of the flat tensors, or reads parameters that
        a caller may have changed."""

    def runs(self) -> List[List[List[Tuple[int, int]]]]:
        """Lists what a step gathers: unit -> parameter group -> runs, in the order in which all ranks gather them."""
        return [[[layout.run(place) for place in layout.places] for layout in layouts_of(self._optimizer())]]

    def first_spans(self, group: int) -> List[Tuple[int, int]]:
        """Lists the spans to step before all others, because :meth:`start_first` can send them: [first, last) in
        elements of this rank's partition of a parameter group."""
        return []

    def before_write(self) -> None:
        """Called before a step writes new values: no rank reads the old ones after it."""
        optimizer = self._optimizer()
        # A parameter may outlive its optimizer.
        for carrier in carriers_of(optimizer).values() if optimizer is not None else ():
            carrier.before_write()

    def start_first(self) -> None:
        """Called on every rank when the elements of :meth:`first_spans` have their new values, before
        :meth:`start`."""

    def start(self) -> None:
        """Called on every rank when the partitions hold their new values."""
        for group, layout in enumerate(layouts_of(self._optimizer())):
            with collective(PURPOSE):
                for work in self.begin(group, [layout.run(place) for place in layout.places]):
                    work.wait()

    def begin(self, group: int, runs: Sequence[Tuple[int, int]]) -> List[Awaitable]:
        """Begins to gather the parameters of a group that have these runs. Returns what to wait for."""
        optimizer = self._optimizer()
        return carrier_of(optimizer, group).gather(optimizer.bit16_groups_flat[group], runs)

    def refuse_to_offload(self, include: Optional[Container[OffloadStateTypeEnum]]) -> None:
        """Raises ValueError if one of the states in ``include`` (None: of all states) cannot move to the host."""

    def wait_all(self) -> None:
        """Does nothing: no parameter is on its way after ``start()``."""
