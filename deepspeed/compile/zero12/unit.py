# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A unit: parameters of which each rank keeps a part, and which are gathered together before they are used.

All parameters of a unit lie in one buffer. When the unit is resharded, the buffer's storage is shrunk to nothing, and
the parameters, which are views of it, stay as they are. What autograd has saved of them are views of the same storage,
so a backward finds their values there when the unit is gathered again.
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Dict, List

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

from .at_rest import mark_sharded, unmark
from .collectives import collective
from .messages import warn
from .subclasses import ON_HOST, plain_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Generated code takes for granted that parameters are aligned to 16 bytes; torch's allocators align to 64 or more.
ALIGN_BYTES = 64
PURPOSE = "gather frozen parameters"
ANOTHER_KIND = (
    "parameter {} was given another dtype or shape, so compile.shard_frozen no longer shards it: it stays whole on "
    "every rank"
)
CHANGED = (
    "parameter {} is sharded over the ranks by compile.shard_frozen and was changed in a forward; the change would be "
    "lost, so make it a buffer, which stays whole, or leave compile.shard_frozen out"
)
DIFFERENT = (
    "ranks gathered the frozen parameters of different blocks: with compile.shard_frozen all ranks run the same "
    "forwards and backwards; for one rank alone, all ranks enter gathered_parameters(engine)"
)


@dataclasses.dataclass(eq=False)
class _Place:
    """Where a tensor lies in the buffer of its unit, and what it was when the unit was made."""

    tensor: torch.Tensor
    dtype: torch.dtype
    shape: torch.Size
    begin: int  # in the buffer, in bytes
    end: int
    version: int = 0  # when the unit was gathered; torch counts changes in place

    @property
    def is_as_made(self) -> bool:
        return (self.tensor.dtype, self.tensor.shape) == (self.dtype, self.shape)

    @property
    def is_changed(self) -> bool:
        return self.tensor._version != self.version


class Unit:
    """Parameters that are gathered together, as bytes, whatever their dtypes.

    Args:
        parameters: name -> parameter, all contiguous.
        process_group: the ranks that share them. It must carry nothing else: other collectives come at other times on
            different ranks, and a process group matches messages by their order alone.
        device: on which the unit is gathered. Parameters may be on the host until the unit is sharded.
        number: of the unit, the same on all ranks.

    Attributes:
        nbytes: of the whole unit, with padding.
        share: this rank's part, 1-D and of bytes. None before :meth:`shard`, and on a single rank.
    """

    def __init__(
        self, parameters: Dict[str, Parameter], process_group: "ProcessGroup", device: torch.device, number: int
    ):
        self._parameters = dict(parameters)
        self._group, self._device = process_group, device
        self._rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._is_shared = world > 1
        self._number = torch.tensor([number], device=device)
        self._numbers = self._number.repeat(world)  # of the units that ranks gather at the same time
        # Name of a parameter -> the places of the tensors with memory of which the parameter is made.
        self._places: Dict[str, List[_Place]] = {}
        nbytes = 0
        for name, parameter in parameters.items():
            self._places[name] = []
            for tensor in plain_tensors([parameter]):
                place = _Place(tensor, tensor.dtype, tensor.shape, nbytes, nbytes + tensor.nbytes)
                self._places[name].append(place)
                nbytes += _aligned(tensor.nbytes)
        self._share_bytes = _aligned(-(-nbytes // world))
        self.nbytes = world * self._share_bytes
        self.share: Any = None
        self._buffer: Any = None  # 1-D, of bytes
        self._work: Any = None  # of the gather that nobody has waited for
        self._compared: Any = None  # of the gather of numbers before it
        self._stream: Any = None  # on which the buffer's memory was allocated
        self.is_gathered = True

    def shard(self) -> None:
        """Moves the parameters into the buffer, keeps this rank's part of it, and reshards it.

        Parameters that DeepSpeed has not broadcast, because they are on the host, get the first rank's values. A
        single rank keeps the parameters where they are, on its device.
        """
        on_host = [parameter for parameter in self._parameters.values() if vars(parameter).pop(ON_HOST, False)]
        if not self._is_shared:
            for tensor in plain_tensors(on_host):
                tensor.data = tensor.data.to(self._device)
            return
        self.share = torch.zeros(self._share_bytes, dtype=torch.uint8, device=self._device)
        self._move_into_new_buffer()
        if on_host:
            with collective(PURPOSE):
                dist.broadcast(self._buffer, src=dist.get_global_rank(self._group, 0), group=self._group)
        self._keep_own_part()
        self.reshard()

    def _move_into_new_buffer(self):
        buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=self._device)
        for place in self._all_places():
            memory = buffer[place.begin : place.end].view(place.dtype).view(place.shape)
            memory.copy_(place.tensor.detach())
            place.tensor.data = memory
        self._buffer = buffer

    # Gathered and resharded ----------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Starts to gather the unit. All ranks must start the same units in the same order.

        Raises:
            DistBackendError: if the collective failed.
        """
        if self.is_gathered or self._work is not None:
            return
        self._buffer.untyped_storage().resize_(self.nbytes)
        self._stream = get_accelerator().current_stream()
        with collective(PURPOSE):
            # First, because parts of different units may differ in size.
            self._compared = dist.all_gather_into_tensor(self._numbers, self._number, group=self._group, async_op=True)
            self._work = dist.all_gather_into_tensor(self._buffer, self.share, group=self._group, async_op=True)

    def finish_gather(self) -> None:
        """Makes the current stream, and on a CPU the calling thread, wait until the unit is gathered.

        Raises:
            DistBackendError: if the parameters could not be received.
        """
        if self.is_gathered:
            return
        self._wait()
        for parameter in self._parameters.values():
            unmark(parameter)
        self.is_gathered = True
        self._note_versions()
        if self._stream is not None and get_accelerator().current_stream() != self._stream:
            # Otherwise the allocator could give the memory away, when it is resharded, while this stream reads it.
            self._buffer.record_stream(get_accelerator().current_stream())

    def _wait(self):
        if self._work is None:
            return
        with collective(PURPOSE):
            self._compared.wait()
            # The host does not wait for a GPU here, so the GPU asserts.
            torch._assert_async((self._numbers == self._number).all(), DIFFERENT)
            self._work.wait()
        self._work = None

    def reshard(self) -> None:
        """Frees the memory of the unit. What this stream was told to compute with it is computed before."""
        if not self._is_shared:
            return
        # A gather that is on its way still writes.
        self._wait()
        if self.is_gathered:
            if any(place.is_changed for place in self._all_places()):
                # A backward raised and left the unit gathered, and a state dict was loaded since.
                self._keep_own_part()
            for name, parameter in self._parameters.items():
                mark_sharded(parameter, name, self)
        self.is_gathered = False
        self._buffer.untyped_storage().resize_(0)

    # Values --------------------------------------------------------------------------------------------------------

    def keep_changes(self) -> None:
        """Keeps the values that the parameters have now, while the unit is gathered.

        What a caller has taken of the parameters, such as a state dict, keeps its memory when the unit is resharded. A
        parameter that has another dtype or shape leaves the unit.
        """
        if not self._is_shared:
            return
        self._let_others_leave()
        self._move_into_new_buffer()
        self._keep_own_part()

    def _let_others_leave(self):
        for name, places in [*self._places.items()]:
            if not all(place.is_as_made for place in places):
                warn(ANOTHER_KIND.format(name))
                del self._places[name], self._parameters[name]

    def _keep_own_part(self):
        begin = self._rank * self._share_bytes
        self.share.copy_(self._buffer[begin : begin + self._share_bytes])
        self._note_versions()

    def refuse_changes(self) -> None:
        """Called after a forward. A parameter that the forward has given another dtype or shape leaves the unit.

        Raises:
            RuntimeError: if a parameter was changed in place since the unit was gathered.
        """
        if not self._is_shared:
            return
        self._let_others_leave()
        for name, places in self._places.items():
            if any(place.is_changed for place in places):
                raise RuntimeError(CHANGED.format(name))

    def _note_versions(self):
        for place in self._all_places():
            place.version = place.tensor._version

    def _all_places(self):
        return itertools.chain.from_iterable(self._places.values())

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory that is freed when the unit is resharded."""
        if not self._is_shared or tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
            return False
        return tensor.untyped_storage()._cdata == self._buffer.untyped_storage()._cdata

    def write(self, name: str, values: torch.Tensor) -> None:
        """Writes this rank's part of a parameter's new values, at rest.

        Raises:
            ValueError: if the values are not made of tensors as the parameter is.
        """
        places = self._places[name]
        sources = list(plain_tensors([values]))
        if len(sources) != len(places):
            raise ValueError(f"parameter {name} is made of {len(places)} tensors, and its new values are not")
        for place, source in zip(places, sources, strict=True):
            self._write(place, source)

    def _write(self, place, source):
        begin = self._rank * self._share_bytes
        first, last = max(place.begin, begin), min(place.end, begin + self._share_bytes)
        if first >= last:
            return
        values = source.to(place.dtype).expand(place.shape).contiguous().view(-1).view(torch.uint8)
        self.share[first - begin : last - begin].copy_(values[first - place.begin : last - place.begin])


def _aligned(nbytes):
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
