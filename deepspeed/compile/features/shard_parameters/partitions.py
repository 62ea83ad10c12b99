# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trained parameters that lie in their owners' partitions alone.

ZeRO-1/2 has a flat tensor of each parameter group on every rank. Here this rank's partition becomes a tensor of its
own, and the flat tensor keeps its shape and loses its memory. If this rank owns any
element of a parameter, the whole parameter always lies in that tensor. Several owners each have memory for all of it.
"""

import bisect
import weakref
from typing import TYPE_CHECKING, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.nn import Parameter

import deepspeed.comm as dist

from ...zero_1_and_2.layout import Layout, layouts_of, partition
from ..overlap_gather.runs import runs
from .places import TensorSlot, begin_of, note_storage
from .private_torch import address_of

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# Alignment of torch's allocators, in bytes. Generated code takes for granted that parameters are aligned to 16 bytes,
# or lie as far from a multiple of 16 bytes as they did in the flat tensor.
ALIGN_BYTES = 64


def aligned(nbytes: int) -> int:
    """Returns the next multiple of ``ALIGN_BYTES``."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class OwnedShard:
    """The parameters of one group that always lie on this rank, because it owns some of their elements.

    Args:
        layout: of the group.
        size: bytes of an element.

    Attributes:
        partition: elements of the flat tensor that this rank owns.
        extent: elements of the flat tensor: ``partition``, and the rest of parameters that have other owners too.
        size: as above.
        memory: of ``extent``, as bytes. None before :meth:`allocate` or :meth:`take_over`.
    """

    def __init__(self, layout: Layout, size: int):
        self.partition, self.size = range(layout.first, layout.first + layout.partition_numel), size
        spans = ((place.first, place.first + place.numel) for place in layout.places)
        inside = [span for span in spans if self.has_any(*span)]
        self.extent = range(
            min([self.partition.start, *(first for first, _ in inside)]),
            max([self.partition.stop, *(last for _, last in inside)]),
        )
        self.memory: Optional[torch.Tensor] = None
        self._slots: List[TensorSlot] = []  # in order

    def has_any(self, first: int, last: int) -> bool:
        """Whether this rank owns any of the elements [first, last)."""
        return first < last and first < self.partition.stop and last > self.partition.start

    def allocate(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Makes the memory, of zeros. Returns the partition, which lies there."""
        return self._lie_in(torch.zeros(self._before + len(self.extent), dtype=dtype, device=device))

    @property
    def _before(self):
        """Elements between the beginning of the memory and ``extent``."""
        return self.extent.start * self.size % ALIGN_BYTES // self.size

    def _lie_in(self, memory):
        self.memory = memory[self._before :].view(torch.uint8)
        begin = self._before + self.partition.start - self.extent.start
        return memory[begin : begin + len(self.partition)]

    def write(self, first: int, values: torch.Tensor) -> None:
        """Writes elements of the flat tensor from ``first`` on, as far as they lie here. ``values``: 1-D."""
        begin, end = max(first, self.extent.start), min(first + values.numel(), self.extent.stop)
        if begin < end:
            self.bytes_of(begin, end).copy_(values[begin - first : end - first].view(torch.uint8))

    def take_over(self, optimizer: "DeepSpeedZeroOptimizer", group: int) -> torch.Tensor:
        """Copies what lies in ``extent`` from the flat tensor, unless it lies here already. Returns the partition."""
        flat, own = optimizer.bit16_groups_flat[group], partition(optimizer, group)
        storage = own.untyped_storage()
        if address_of(storage) != address_of(flat.untyped_storage()):
            # `from_host.py` has made the optimizer, and the memory by allocate().
            return self._lie_in(own.as_strided((storage.nbytes() // self.size,), (1,), 0))
        own = self.allocate(flat.dtype, flat.device)
        self.write(self.extent.start, flat[self.extent.start : self.extent.stop])
        return own

    def span(self, first: int, last: int) -> Tuple[int, int]:
        """Returns where elements [first, last) of the flat tensor lie in the memory, in bytes."""
        return (first - self.extent.start) * self.size, (last - self.extent.start) * self.size

    def bytes_of(self, first: int, last: int) -> torch.Tensor:
        """Returns elements [first, last) of the flat tensor, as bytes."""
        assert self.memory is not None
        begin, end = self.span(first, last)
        return self.memory[begin:end]

    def note(self, slot: TensorSlot) -> None:
        """Notes where a parameter lies here."""
        bisect.insort(self._slots, slot, key=begin_of)

    def find(self, offset: int) -> Optional[TensorSlot]:
        """Returns the slot at an offset in bytes in the memory's storage, if one was noted."""
        offset -= self.memory.storage_offset()
        number = bisect.bisect(self._slots, offset, key=begin_of) - 1
        return None if number < 0 or offset >= self._slots[number].end else self._slots[number]


class Partitions:
    """What lies on this rank of all parameter groups.

    Args:
        optimizer: a ZeRO-1/2 optimizer. Only a weak reference is kept.

    Attributes:
        shards: of each parameter group.
    """

    def __init__(self, optimizer: "DeepSpeedZeroOptimizer"):
        self._optimizer = weakref.ref(optimizer)
        self._own: List[torch.Tensor] = []
        groups = zip(layouts_of(optimizer), optimizer.bit16_groups_flat, strict=True)
        self.shards = [OwnedShard(layout, flat.element_size()) for layout, flat in groups]

    def take_over(self) -> None:
        """Copies what lies here into tensors of their own."""
        optimizer = self._optimizer()
        self._own = [shard.take_over(optimizer, group) for group, shard in enumerate(self.shards)]
        for shard in self.shards:
            note_storage(shard.memory.untyped_storage(), shard)

    def give_up_flat(self) -> None:
        """Gives back the memory of the flat tensors, when no parameter lies there."""
        optimizer = self._optimizer()
        for group, (flat, own) in enumerate(zip(optimizer.bit16_groups_flat, self._own)):
            rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
            optimizer.parallel_partitioned_bit16_groups[group][rank] = own
            flat.untyped_storage().resize_(0)
        self.link()

    def link(self) -> None:
        """Links parameters with this rank's part of them. The base has linked them with the flat tensor."""
        for layout, own in zip(layouts_of(self._optimizer()), self._own, strict=True):
            for place in layout.places:
                mapping = getattr(place.parameter, "_hp_mapping", None)
                if mapping is not None:
                    address = mapping.get_hp_fragment_address()
                    mapping.lp_fragment = own.narrow(0, address.start, address.numel)


class _Message(NamedTuple):
    """Elements [first, last) of a group's flat tensor, which their owner sends to all."""

    group: int
    owner: int
    first: int
    last: int
    begin: Optional[int]  # in the unit's memory, in bytes, unless they lie in an OwnedShard


class TrainedPart:
    """The trained parameters of a unit: where they lie here, and what owners send.

    Args:
        optimizer: a ZeRO-1/2 optimizer.
        partitions: of this rank.
        parameters: name -> parameter, of the unit.
        begin: where these may lie in the unit's memory, in bytes.

    Attributes:
        slots: of the parameters.
        end: where they end in the unit's memory, in bytes.
    """

    def __init__(
        self,
        optimizer: "DeepSpeedZeroOptimizer",
        partitions: Partitions,
        parameters: Dict[str, Parameter],
        begin: int,
    ):
        self._shards = partitions.shards
        layouts = layouts_of(optimizer)
        self.end = begin
        self._messages: List[_Message] = []
        before = None
        for group, first, last, owner in runs(layouts, [*parameters.values()], parts_alone=True):
            shard, place = self._shards[group], None
            # If this rank owns a part of a parameter, the other owners' parts of it lie there too.
            if not (shard.extent.start <= first and last <= shard.extent.stop):
                if before is not None and before.begin is not None and (before.group, before.last) == (group, first):
                    # Perhaps another part of one parameter.
                    place = self.end
                else:
                    place = aligned(self.end) + first * shard.size % ALIGN_BYTES
                self.end = place + (last - first) * shard.size
            before = _Message(group, owner, first, last, place)
            self._messages.append(before)
        self.slots = [*self._slots(layouts, {id(parameter): name for name, parameter in parameters.items()})]

    def _slots(self, layouts, names) -> Iterator[TensorSlot]:
        for group, (shard, layout) in enumerate(zip(self._shards, layouts, strict=True)):
            for parameter, first, numel in layout.places:
                name = names.get(id(parameter))
                if name is None:
                    continue
                last = first + numel
                if shard.has_any(first, last):
                    yield TensorSlot(name, parameter, *shard.span(first, last), shard, is_trained=True)
                else:
                    message = next(sent for sent in self._messages if sent.group == group and first < sent.last)
                    # Nothing of it lies here always.
                    assert message.begin is not None
                    begin = message.begin + (first - message.first) * shard.size
                    yield TensorSlot(name, parameter, begin, begin + (last - first) * shard.size, is_trained=True)

    def messages(self, memory: torch.Tensor) -> Iterator[Tuple[int, torch.Tensor]]:
        """Yields (owner, bytes) of each message. ``memory`` is the unit's."""
        for group, owner, first, last, begin in self._messages:
            shard = self._shards[group]
            if begin is None:
                yield owner, shard.bytes_of(first, last)
            else:
                yield owner, memory[begin : begin + (last - first) * shard.size]
