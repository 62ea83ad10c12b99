# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of its parameters, masters and moments, and of gradients while a backward runs.

Nothing native is needed, so that a machine without a C++ compiler can ask. ``send()`` counts as the native reducer
does (``csrc/compile/order.cpp``, ``bucket.cpp``), and tests hold it to the reducer's own counters.
"""

import itertools
from types import SimpleNamespace
from typing import Any, List, NamedTuple, Sequence, Set

import torch
from torch.nn import Parameter

from ...zero_1_and_2.engine.set_up import send_numel
from ...zero_1_and_2.gradient.layout import flat_layout
from ...zero_1_and_2.step.partition_gradient import GATHERED_NUMEL, IN_PLACE_NUMEL
from .modes import Question

# DeepSpeed pads a flat tensor to a multiple of so many elements for each rank (``nccl_start_alignment_factor``).
ALIGNMENT = 2


def layout_of(parameters: Sequence[torch.Tensor], ranks: int) -> Any:
    """Returns what the layout and the gathers read of a ZeRO-1/2 optimizer of one parameter group."""
    ends = list(itertools.accumulate(parameter.numel() for parameter in parameters))
    return SimpleNamespace(
        round_robin_bit16_groups=[list(parameters)],
        round_robin_bit16_offsets=[[0, *ends][: len(parameters)]],
        partition_size=[-(-(ends[-1] if ends else 0) // (ranks * ALIGNMENT)) * ALIGNMENT],
    )


def _owned(parameters: Sequence[torch.Tensor], ranks: int, rank: int) -> List[int]:
    """Returns of how many elements of each parameter a rank has the gradient in the end."""
    layout = layout_of(parameters, ranks)
    first = rank * layout.partition_size[0]
    last = first + layout.partition_size[0]
    return [
        max(min(offset + parameter.numel(), last) - max(offset, first), 0)
        for parameter, offset in flat_layout(layout, 0)
    ]


class Sent(NamedTuple):
    """What a rank holds of gradients, in bytes.

    Attributes:
        before: before the backward at the boundary: of earlier micro-batches.
        arrived: after each gradient of that backward.
        bound: after the backward, and in the step.
    """

    before: int
    arrived: List[int]
    bound: int


class _Reducer:
    """What the native reducer of a rank holds, in elements.

    Args:
        numels: of each parameter.
        owned: of each parameter, how many elements of its averaged gradient the rank keeps.
        flat: of the one tensor for these, 0 if each has its own.
        turns: parameters in the order in which gradients are sent; none if there is no rank to send them to.
        bucket: ``reduce_bucket_size``.
        enough: with how many elements a bucket is sent.
        overlap: whether the backward goes on while a bucket travels.
    """

    def __init__(
        self,
        numels: Sequence[int],
        owned: Sequence[int],
        flat: int,
        turns: Sequence[int],
        bucket: int,
        enough: int,
        overlap: bool,
    ):
        self._numels, self._owned, self._flat, self._turns = numels, owned, flat, turns
        self._bucket, self._enough, self._overlap = bucket, enough, overlap
        # Indices of parameters: in the bucket that is filled, in the one that was sent, and beside these.
        self._filling: Set[int] = set()
        self._in_flight: Set[int] = set()
        self._unreduced: Set[int] = set()
        self._bound: Set[int] = set()
        # Of this backward: those that came, and sums that it began before their turn.
        self._came: Set[int] = set()
        self._early: Set[int] = set()
        self._taken = 0

    def _numel(self, indices):
        return sum(self._numels[index] for index in indices)

    @property
    def waiting(self) -> int:
        """Of gradients that the rank has not sent, or that are on their way."""
        return self._numel(self._unreduced) + self._numel(self._filling) + self._numel(self._in_flight)

    @property
    def bound(self) -> int:
        """Of averaged gradients."""
        bound = sum(self._owned[index] for index in self._bound)
        return self._flat if self._flat and (bound or self._bound.issuperset(range(len(self._numels)))) else bound

    def keep(self, index: int) -> None:
        """A gradient of a backward that does not reduce."""
        self._unreduced.add(index)

    def begin(self) -> None:
        """The beginning of a backward."""
        self._taken = 0
        self._came.clear()
        self._early.clear()

    def reduce(self, index: int) -> None:
        """A gradient of a backward that reduces."""
        if not self._numels[index]:
            return
        if not self._turns:
            self._unreduced.discard(index)
            self._bound.add(index)
            return
        self._send_those_in_turn()
        self._came.add(index)
        left = self._turns[self._taken :]
        if left[:1] == [index]:
            self._send_those_in_turn()
        elif index in left:
            self._keep_early(index)
        elif index not in self._filling:
            self._unreduced.add(index)

    def finish(self) -> None:
        """The end of a backward that reduces."""
        while self._taken < len(self._turns):
            self._send_turn()
        if not self._turns:
            self._unreduced.clear()
        self._launch()
        self._drain()
        # A parameter without a gradient is stepped too, on zeros.
        self._bound.update(range(len(self._numels)))

    def _keep_early(self, index):
        if index not in self._unreduced:
            self._early.add(index)
        self._unreduced.add(index)
        limit = self._bucket + self._numels[index]
        while self._numel(self._early) > limit and self._turns[self._taken] not in self._came:
            self._send_turn()
            self._send_those_in_turn()

    def _send_those_in_turn(self):
        while self._taken < len(self._turns) and self._turns[self._taken] in self._came:
            self._send_turn()

    def _send_turn(self):
        index = self._turns[self._taken]
        self._taken += 1
        self._unreduced.discard(index)
        self._early.discard(index)
        self._enqueue(index)

    def _enqueue(self, index):
        if index in self._filling:
            return
        sent, filling = [self._numels[each] for each in self._in_flight], self._numel(self._filling | {index})
        if sent and sum(sent) - max(sent) + filling > self._bucket:
            self._drain()
        self._filling.add(index)
        if filling >= min(self._bucket / 2, max(self._enough, self._numel(self._in_flight) / 2)):
            self._launch()

    def _launch(self):
        self._drain()
        self._filling, self._in_flight = set(), self._filling
        if not self._overlap:
            self._drain()

    def _drain(self):
        self._bound |= self._in_flight
        self._in_flight = set()


def send(
    parameters: Sequence[Parameter],
    arrivals: Sequence[int],
    ranks: int,
    rank: int,
    stage: int = 1,
    accumulation: int = 1,
    bucket: int = Question.bucket,
    overlap: bool = True,
    on_host: bool = False,
) -> Sent:
    """Reckons what the reducer of one rank holds of the gradients of a step.

    Args:
        parameters: in the order of the flat tensor.
        arrivals: indices of parameters in the order in which their gradients arrive.
        ranks, rank: how many ranks share the parameters, and which of them this is.
        stage: of ZeRO.
        accumulation: micro-batches in a step.
        bucket: ``reduce_bucket_size``.
        overlap: whether buckets travel while the backward goes on.
        on_host: whether what has arrived lies in the host's memory, which does not count.
    """
    size, numels = parameters[0].element_size(), [parameter.numel() for parameter in parameters]
    # After its first step the reducer expects gradients in the order in which they arrived.
    last = {index: place for place, index in enumerate(arrivals)}
    sent = [index for index, numel in enumerate(numels) if numel and ranks > 1]
    turns = sorted(sent, key=lambda index: last.get(index, len(arrivals)))
    # In the masters' dtype, what is averaged lies in one flat tensor.
    flat = layout_of(parameters, ranks).partition_size[0] if parameters[0].dtype == torch.float32 else 0
    owned = _owned(parameters, ranks, rank)
    reducer = _Reducer(numels, owned, flat, turns, bucket, send_numel(ranks), overlap)

    def held() -> int:
        return size * (reducer.waiting + (0 if on_host else reducer.bound))

    for _ in range(accumulation - 1):
        reducer.begin()
        for index in arrivals:
            (reducer.reduce if stage == 2 else reducer.keep)(index)
        if stage == 2:
            reducer.finish()
    before = held()
    reducer.begin()
    arrived = []
    for index in arrivals:
        reducer.reduce(index)
        arrived.append(held())
    reducer.finish()
    # What is left of a tied weight's second gradient would be sent when ranks have agreed on it.
    return Sent(before, arrived, 0 if on_host else size * reducer.bound)


def gathered_in_step(parameters: Sequence[torch.Tensor], ranks: int, rank: int) -> int:
    """Returns the bytes of the copy in which the update reads a rank's small gradients together."""
    small = [numel for numel in _owned(parameters, ranks, rank) if numel < IN_PLACE_NUMEL]
    return min(sum(small), GATHERED_NUMEL) * parameters[0].element_size()
