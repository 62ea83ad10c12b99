# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of FSDP2, by its published scheme, for comparison.

fp32 parameters and moments are sharded. A unit, a block or what is before or behind the blocks, is gathered in bf16
before it computes. Its gradients are complete at the end of its backward, and are copied into the input of a
reduce-scatter, whose output is cast to fp32: a rank's share of the gradients. ``benchmarks/systems.py`` sets FSDP2 up
so.
"""

import math
from typing import Dict, List, NamedTuple, Sequence

from .activations import Activations
from .liveness import Moment

_FP32, _STATES = 4, 12  # bytes of an element: of a gradient, and of a master weight with its moments


class Unit(NamedTuple):
    """Parameters that FSDP2 gathers together."""

    trained: Sequence[str]  # names of the trained parameters
    elements: int  # elements of all parameters
    # frozen, sharded: a rank's share of those that are frozen, and of those that are trained.
    frozen: int
    sharded: int
    is_root: bool = False  # whether the unit is unsharded from the forward to the end of the backward


def share_of(shape: Sequence[int], ranks: int) -> int:
    """Returns the elements of a rank's share of a parameter, which is cut along its first dimension, and padded."""
    rows, *others = shape or (1,)
    return -(-rows // ranks) * math.prod(others)


class Peaks(NamedTuple):
    """Bytes on a rank."""

    at_rest: int
    forward: int
    backward: int
    step: int


def peaks_of(
    activations: Activations,
    units: Sequence[Unit],
    sizes: Dict[str, int],
    reshard: bool,
    size: int,
    adds: bool = False,
) -> Peaks:
    """Returns the bytes on a rank.

    Args:
        activations: the activations of a micro-batch.
        units: the units in the order of the forward.
        sizes: name of a trained parameter -> elements.
        reshard: whether a unit is resharded after its forward, and unsharded again for its backward.
        size: bytes of a gathered element.
        adds: whether the rank holds its share of gradients of earlier micro-batches, to which it adds.
    """
    trained = [sum(sizes[name] for name in unit.trained) for unit in units]
    unit_of = {name: index for index, unit in enumerate(units) for name in unit.trained}
    elements = [unit.elements for unit in units]
    root = sum(unit.elements for unit in units if unit.is_root)
    shares = [unit.sharded for unit in units]
    at_rest = _STATES * sum(shares) + size * sum(unit.frozen for unit in units)
    most = max(moment.most for moment in activations.forward)
    # The unit that was gathered last is also in the buffer of the all-gather. At the peak any unit may be in use but
    # the first, before which there are no activations.
    last = max(elements[1:] or elements)
    kept = size * (root + last if reshard else sum(elements))
    forward = at_rest + most + kept + size * last
    earlier = _FP32 * sum(shares) if adds else 0
    backward, sharded, unit = 0, earlier, len(units) - 1
    held: Dict[int, int] = {index: 0 for index in range(len(units))}
    ends = _ends(activations.backward, unit_of, len(units))
    for index, moment in enumerate(activations.backward):
        # The unit that computes, and the unit that is gathered at the same time.
        first = max(unit - 1, 1 if root else 0)
        gathered = size * (root + sum(elements[first : unit + 1]) if reshard else sum(elements[: unit + 1]))
        backward = max(backward, sharded + gathered + sum(held.values()) + moment.most)
        if moment.gradient is not None and (owner := unit_of[moment.gradient]) in held:
            held[owner] += size * sizes[moment.gradient]
        while unit >= 0 and index >= ends[unit]:
            scattered = size * (trained[unit] + shares[unit])
            backward = max(backward, sharded + gathered + sum(held.values()) + scattered + moment.after)
            sharded += 0 if adds else _FP32 * shares[unit]
            del held[unit]
            unit -= 1
    return Peaks(at_rest, forward + earlier, at_rest + backward, at_rest + _FP32 * sum(shares))


def _ends(moments: Sequence[Moment], unit_of: Dict[str, int], count: int) -> List[int]:
    """Returns for each unit the index of the moment in which its backward ends.

    That is the moment of its last gradient. A unit without gradients ends in the moment before the next unit's first.
    """
    complete: Dict[int, List[int]] = {}
    for index, moment in enumerate(moments):
        if moment.gradient is not None:
            complete.setdefault(unit_of[moment.gradient], []).append(index)
    ends, end = [0] * count, 0
    for unit in reversed(range(count)):
        if unit in complete:
            end = max(end, complete[unit][-1])
        else:
            lower = [indices[0] - 1 for other, indices in complete.items() if other < unit]
            end = max(end, min(lower, default=len(moments) - 1))
        ends[unit] = end
    return ends
