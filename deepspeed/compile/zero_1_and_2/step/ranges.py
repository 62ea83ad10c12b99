# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The pass over a flat partition, range by range.

The fp32 gradients of a partition need twice the memory of its bf16 gradients, and the temporaries of an optimizer may
need as much again. If the optimizer treats each element by itself, the fp32 gradients and the temporaries need to
exist only for one range at a time.
"""

from typing import Callable, List, Tuple

from .partition_gradient import PartitionGradient
from .rule import Step

# A partition of fewer elements is stepped as a whole: to step some spans first would take longer.
SMALL_NUMEL = 2**24


class Ranges:
    """Steps a partition range by range.

    Args:
        written: a function to call with (first, last) when the new values of the elements [first, last) are written.
    """

    def __init__(self, step: Step, numel: int, gradient: PartitionGradient, written: Callable[[int, int], None]):
        self._step, self._numel, self._gradient, self._written = step, numel, gradient, written
        self._spans = [(0, numel)]  # elements that are not stepped yet

    def step_first(self, spans: List[Tuple[int, int]]) -> None:
        """Steps the elements in ``spans``, [first, last) in ascending order, before all others.

        A span must not cut a gradient. If the partition is small, this steps all elements.
        """
        if spans and self._numel < SMALL_NUMEL:
            spans = [(0, self._numel)]
        self._run(spans)
        borders = [border for span in spans for border in span]
        self._spans = [*zip([0, *borders[1::2]], [*borders[::2], self._numel], strict=True)]
        # Other partitions are stepped before the rest of this one.
        self._gradient.give_memory_back()

    def step_rest(self) -> None:
        """Steps all other elements, and the states that belong to no element, such as counts of steps."""
        self._run(self._spans)
        self._step.finish()

    def _run(self, spans):
        for first, end in spans:
            while first < end:
                last = self._step.run(self._gradient, first, end)
                if not first < last <= end:
                    raise RuntimeError(
                        f"{type(self._step).__name__}.run() was to step elements from {first} to {end} at most and "
                        f"returned {last}; a rule must return the end of the elements that it has stepped"
                    )
                self._written(first, last)
                first = last
