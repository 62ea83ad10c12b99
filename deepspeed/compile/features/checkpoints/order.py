# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The order of elements on disk: partitions are cut as the base cuts them, out of its flat tensor.

In memory each rank has a shard of each parameter (``layout.py``). When an optimizer is made, saved or loaded, ranks
exchange elements, so that a checkpoint is one of DeepSpeed's.
"""

from typing import Dict, Iterable, Iterator, List, NamedTuple, Tuple, Union

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.collectives import collective, every_rank_raises
from ...zero_1_and_2.layout import Layout

# Elements of all ranks' partitions that are exchanged at once.
EXCHANGED_NUMEL = 2**24
PURPOSE = "exchange elements between the order in memory and that of checkpoints"


# The other rank, the offset in the base's partition, by which both order what they send, the offset here, elements.
Entry = Tuple[int, int, int, int]


class Span(NamedTuple):
    """Neighbouring elements of one parameter that lie in one partition of both orders.

    They begin at ``in_base`` in the partition of rank ``base`` in the base's order, and at ``in_even`` in that of rank
    ``even`` in memory. ``source`` is their offset in the parameter.
    """

    source: int
    base: int
    in_base: int
    even: int
    in_even: int
    numel: int


class BaseOrder:
    """The base's order of one parameter group, and the exchange between it and that in memory.

    Args:
        layout: the order in memory.
        firsts: where each parameter of it lies in the base's flat tensor.
        alignment: elements to a multiple of which the base pads each partition.
        process_group, device: of the exchange.

    Attributes:
        numel: elements of a partition of the base, with padding.
    """

    def __init__(
        self, layout: Layout, firsts: List[int], alignment: int, process_group: ProcessGroup, device: torch.device
    ):
        self.layout, self.firsts, self._group, self._device = layout, firsts, process_group, device
        self._end = max((first + place.numel for first, place in zip(firsts, layout.places, strict=True)), default=0)
        self.numel = -(-self._end // (layout.world * alignment)) * alignment

    def own_padding(self) -> int:
        """Returns how many elements at the end of this rank's partition of the base are padding."""
        return min(max((self.layout.rank + 1) * self.numel - self._end, 0), self.numel)

    def spans_of_base(self, rank: int) -> Iterator[Span]:
        """Yields the spans in a rank's partition in the base's order, ascending there."""
        begin, end = rank * self.numel, (rank + 1) * self.numel
        for first, place in zip(self.firsts, self.layout.places, strict=True):
            source, last = max(begin - first, 0), min(end - first, place.numel)
            while source < last:
                even, inside = divmod(source, place.shard)
                numel = min(place.shard - inside, last - source)
                yield Span(source, rank, first + source - begin, even, place.offset + inside, numel)
                source += numel

    def spans_of_even(self, rank: int) -> Iterator[Span]:
        """Yields the spans in a rank's partition in memory, ascending there."""
        for first, place in zip(self.firsts, self.layout.places, strict=True):
            piece = place.piece(rank)
            source, last = piece.source_offset, piece.source_offset + piece.numel
            while source < last:
                base, inside = divmod(first + source, self.numel)
                numel = min(self.numel - inside, last - source)
                in_even = place.offset + source - rank * place.shard
                yield Span(source, base, inside, rank, in_even, numel)
                source += numel

    def to_base(self, values: torch.Tensor, device: Union[str, torch.device]) -> torch.Tensor:
        """Returns the elements of this rank's partition in the base's order, 1-D, on a device. Padding is zero.

        All ranks call it. ``values``: one for each element of this rank's partition in memory, 1-D.
        """
        result = self._room(self.numel, 0, values.dtype, device)
        of_even, of_base = self._entries()
        self._exchange(values, of_even, result, of_base)
        return result

    def to_even(self, values: torch.Tensor, device: Union[str, torch.device], padding: int = 0) -> torch.Tensor:
        """Does the reverse of :meth:`to_base`. ``values`` may be longer than a partition of the base.

        ``padding``: the value of elements that the base does not have.
        """
        result = self._room(self.layout.partition_numel, padding, values.dtype, device)
        of_even, of_base = self._entries()
        self._exchange(values, of_base, result, of_even)
        return result

    def _entries(self):
        """Returns the entries of this rank's partition in memory, and those of its partition in the base's order."""
        rank = self.layout.rank
        of_even = ((span.base, span.in_base, span.in_even, span.numel) for span in self.spans_of_even(rank))
        of_base = ((span.even, span.in_base, span.in_base, span.numel) for span in self.spans_of_base(rank))
        return of_even, of_base

    def _room(self, numel, value, dtype, device):
        def allocate():
            return torch.full((numel,), value, dtype=dtype, device=device)

        if self.layout.world == 1:
            return allocate()
        # Otherwise the other ranks would wait in the exchange for one whose memory ran out.
        with every_rank_raises("make room for elements in another order", self._group):
            return allocate()

    def _exchange(self, source, sent, result, awaited):
        """Sends elements of ``source``, and writes those that come to ``result``.

        ``sent`` and ``awaited``: (other rank, offset in the base's partition, offset here, elements). All ranks go
        through the base's partitions in the same steps.
        """
        step = max(EXCHANGED_NUMEL // self.layout.world, 1)
        sent, awaited = _by_step(sent, step), _by_step(awaited, step)
        for number in range(-(-self.numel // step)):
            self.exchange_at_once(source, sent.get(number, ()), result, awaited.get(number, ()))

    def exchange_at_once(
        self, source: torch.Tensor, sent: Iterable[Entry], result: torch.Tensor, awaited: Iterable[Entry]
    ) -> None:
        """Sends elements of ``source`` to other ranks, and writes those that come to ``result``. All ranks call it."""
        here, there = self._sorted(sent, source), self._sorted(awaited, result)
        if self.layout.world == 1:
            for part, place in zip(here[0], there[0], strict=True):
                place.copy_(part)
            return
        empty = torch.empty(0, dtype=source.dtype, device=self._device)
        outgoing = torch.cat([empty, *(part.to(self._device) for part in here[0])])
        incoming = empty.new_empty(sum(there[1]))
        with collective(PURPOSE):
            # As bytes, because backends lack some dtypes.
            dist.all_to_all_single(
                incoming.view(torch.uint8),
                outgoing.view(torch.uint8),
                output_split_sizes=[numel * empty.element_size() for numel in there[1]],
                input_split_sizes=[numel * empty.element_size() for numel in here[1]],
                group=self._group,
            )
        for part, place in zip(incoming.split([place.numel() for place in there[0]]), there[0], strict=True):
            place.copy_(part)

    def _sorted(self, entries, tensor) -> Tuple[List[torch.Tensor], List[int]]:
        """Returns views of a tensor in the order of the other ranks, and how many elements each of these has."""
        sizes = [0] * self.layout.world
        entries = sorted(entries)
        for rank, _, _, numel in entries:
            sizes[rank] += numel
        return [tensor.narrow(0, offset, numel) for _, _, offset, numel in entries], sizes


def _by_step(entries, step) -> Dict[int, List[Tuple[int, int, int, int]]]:
    """Cuts entries at multiples of ``step`` in the base's partition. Returns number of a step -> its entries."""
    found: Dict[int, List[Tuple[int, int, int, int]]] = {}
    for rank, in_base, offset, numel in entries:
        while numel:
            number = in_base // step
            part = min(numel, (number + 1) * step - in_base)
            found.setdefault(number, []).append((rank, in_base, offset, part))
            in_base, offset, numel = in_base + part, offset + part, numel - part
    return found


def base_orders(optimizer: DeepSpeedZeroOptimizer, layouts: List[Layout]) -> List[BaseOrder]:
    """Returns the base's order of each parameter group."""
    alignment, device = optimizer.nccl_start_alignment_factor, torch.device(get_accelerator().current_device_name())
    groups = zip(layouts, optimizer.round_robin_bit16_offsets, optimizer.real_dp_process_group, strict=True)
    return [BaseOrder(layout, firsts, alignment, group, device) for layout, firsts, group in groups]
