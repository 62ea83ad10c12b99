# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where gathered parameters lie, and which parameters a memory holds."""

import dataclasses
import operator
import weakref
from typing import Any, Dict

import torch

# Address of a storage -> the UnitMemory, which finds the slot at an offset there.
KNOWN_STORAGES: Dict[int, "weakref.ref[Any]"] = {}


def note_storage(storage: torch.UntypedStorage, knows: Any) -> None:
    """Enters what finds slots in a storage into ``KNOWN_STORAGES``, as long as that object lives."""
    # data_ptr() is 0 of every storage whose memory was given back, and Python's object of a storage comes and goes.
    address = storage._cdata
    reference = KNOWN_STORAGES[address] = weakref.ref(knows)
    weakref.finalize(knows, _forget, address, reference).atexit = False


def _forget(address, reference):
    # The address may have become another unit's.
    if KNOWN_STORAGES.get(address) is reference:
        del KNOWN_STORAGES[address]


@dataclasses.dataclass(eq=False)
class TensorSlot:
    """Where a tensor lies, and what it was when its unit was made."""

    name: str  # of the parameter
    tensor: torch.Tensor
    begin: int  # in bytes, in the unit's buffer
    end: int
    is_trained: bool = False
    unit: Any = None  # a weak reference to the Unit, which has the slot
    version: int = 0  # when the unit was gathered; torch counts changes in place

    def __post_init__(self) -> None:
        self.dtype, self.shape = self.tensor.dtype, self.tensor.shape

    @property
    def is_as_made(self) -> bool:
        tensor = self.tensor
        return tensor.dtype == self.dtype and tensor.shape == self.shape and tensor.is_contiguous()

    def memory_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the tensor's memory. ``buffer``: of the unit, 1-D and of bytes."""
        return buffer[self.begin : self.end].view(self.dtype).view(self.shape)

    def is_in(self, buffer: torch.Tensor) -> bool:
        """Whether the tensor lies there, and was not given other memory."""
        return self.tensor.data_ptr() == buffer.data_ptr() + self.begin

    def move_into(self, buffer: torch.Tensor) -> None:
        """Moves the tensor's values there."""
        memory = self.memory_in(buffer)
        memory.copy_(self.tensor.detach())
        self.tensor.data = memory


begin_of = operator.attrgetter("begin")
