# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A unit: parameters of which each rank keeps a part, and which are gathered together before they are used.

The parameters of a unit lie in one buffer, but for trained ones of which this rank owns anything. When the unit is
resharded, the buffer's storage is shrunk to nothing, and the parameters, which are views of it, stay as they are. What
autograd has saved of them are handles (``saved_tensors.py``). If anyone else has a view of that memory, such as a
state dict or a NumPy array, the memory stays as it is, and the values there remain those of the parameters.
"""

import bisect
import itertools
import time
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.nn import Parameter

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.collectives import collective
from ...zero_1_and_2.messages import warn
from ..overlap_gather.gather import grouped
from ..subclasses.calls import BROADCAST_LATER
from ..subclasses.tensors import plain_tensors
from .at_rest import ended, keep_owner, mark_resharded, unmark
from .comparison import PURPOSE, Comparison
from .partitions import TrainedPart, aligned
from .places import UNITS, Place, note_storage
from .private_torch import address_of, users_of, version_of, without_torch_function

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# For which a thread of gloo's may keep the memory of a gather that is done. It takes longer only on a busy machine.
LONGEST_HELD = 1.0  # seconds
ANOTHER_KIND_OF_TRAINED = (
    "trained parameter {} was given another dtype or shape, which compile.shard_parameters does not keep: it has its "
    "dtype, shape and values from before again; change its values in place, or make another engine of the model"
)
ANOTHER_KIND = (
    "parameter {} was given another dtype or shape, so compile.shard_parameters no longer shards it: it stays whole "
    "on every rank"
)


class Unit:
    """Parameters that are gathered together, as bytes, whatever their dtypes.

    Args:
        parameters: name -> parameter, all contiguous.
        process_group: the ranks that share them. It must carry nothing else: other collectives come at other times on
            different ranks, and a process group matches messages by their order alone.
        device: on which the unit is gathered. Parameters may be on the host until the unit is sharded.
        number: of the unit, the same on all ranks and no other unit's, also of other engines.
        trained: name -> parameter, of those that the optimizer has and that are sharded.
        make_trained: (these, where they may begin in the buffer, in bytes) -> what says where they lie.

    Attributes:
        nbytes: of the whole unit, with padding.
        share: this rank's part, 1-D and of bytes. None before :meth:`shard`, and on a single rank.
        is_used: whether code that may change the parameters has run since the unit was gathered.
        is_lent: whether others had views of the unit's memory when the unit was resharded. The memory holds the
            parameters' values then, and those who have it may change these.
    """

    def __init__(
        self,
        parameters: Dict[str, Parameter],
        process_group: "ProcessGroup",
        device: torch.device,
        number: int,
        trained: Optional[Dict[str, Parameter]] = None,
        make_trained: Optional[Callable[[Dict[str, Parameter], int], TrainedPart]] = None,
    ):
        self._parameters = {**parameters, **(trained or {})}
        self._group, self._device = process_group, device
        self._rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._is_shared = world > 1
        self._comparison = Comparison(number, process_group, device)
        # Name of a parameter -> the places of the tensors with memory of which the parameter is made.
        self._places: Dict[str, List[Place]] = {}
        nbytes = 0
        for name, parameter in parameters.items():
            self._places[name] = []
            for tensor in plain_tensors([parameter]):
                self._places[name].append(Place(name, tensor, nbytes, nbytes + tensor.nbytes))
                nbytes += aligned(tensor.nbytes)
        self._share_bytes = aligned(-(-nbytes // world))
        self._frozen_bytes = self.nbytes = world * self._share_bytes
        self._trained = make_trained(trained, self.nbytes) if trained and make_trained else None
        if self._trained:
            self._places.update({place.name: [place] for place in self._trained.places})
            self.nbytes = aligned(self._trained.end)
        in_buffer = (place for place in self._all_places() if place.home is None)
        self._in_buffer = sorted(in_buffer, key=lambda place: place.begin)
        self._begins = [place.begin for place in self._in_buffer]
        self.share: Any = None
        self._buffer: Any = None  # 1-D, of bytes
        self._typed: Dict[torch.dtype, torch.Tensor] = {}  # the buffer as of other dtypes
        self._aliases: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # address of a tensor -> the tensor
        self._target: Any = None  # of a gather
        self._works: Optional[List[Any]] = None  # of the gather that nobody has waited for
        self._stream: Any = None  # on which the buffer's memory was allocated
        self._readers: List[Any] = []  # streams that have waited for the gather
        self._owner: "Optional[weakref.ref[Any]]" = None
        self.is_gathered = True
        self.is_used = self.is_lent = False

    @property
    def owner(self) -> Any:
        """The ``ShardedBlocks`` of the unit, which has a weak reference. Without one, it stays whole."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)

    def shard(self) -> None:
        """Moves the parameters into the buffer, keeps this rank's part of it, and reshards it.

        A single rank keeps the parameters where they are, on its device.
        """
        if not self._is_shared:
            for tensor in plain_tensors(self._parameters[name] for name in self._take_marks()):
                tensor.data = tensor.data.to(self._device)
            return
        self.take_in()
        self.is_used = True
        self.reshard()

    def _take_marks(self):
        """Returns the names of the parameters that were on the host, and forgets that they were."""
        return {name for name, each in self._parameters.items() if vars(each).pop(BROADCAST_LATER, False)}

    def take_in(self) -> None:
        """Moves the parameters into the buffer and this rank's partition.

        DeepSpeed has not broadcast parameters that were on the host. Frozen ones get the first rank's values here.
        Trained ones have none: ``from_host.py`` has cut them, and their values lie with their owners.
        """
        self.share = torch.zeros(self._share_bytes, dtype=torch.uint8, device=self._device)
        self._set_buffer(torch.zeros(self.nbytes, dtype=torch.uint8, device=self._device))
        from_host = self._take_marks()
        for place in self._all_places():
            if place.home is not None:
                place.home.note(self, place)
            if place.is_trained and place.name in from_host:
                place.tensor.data = place.memory_in(self._buffer)
            else:
                place.move_into(self._buffer)
        if any(not self.trains(name) for name in from_host):
            with collective(PURPOSE):
                frozen = self._buffer[: self._frozen_bytes]
                dist.broadcast(frozen, src=dist.get_global_rank(self._group, 0), group=self._group)

    def _set_buffer(self, buffer):
        if self._buffer is not None:
            UNITS.pop(address_of(self._buffer.untyped_storage()), None)
        self._buffer = buffer
        self._typed = {dtype: buffer.view(dtype) for dtype in {place.dtype for place in self._in_buffer}}
        note_storage(buffer.untyped_storage(), self)

    # Gathered and resharded ----------------------------------------------------------------------------------------

    def start_gather(self, evaluates: bool = False) -> None:
        """Starts to gather the unit. All ranks must start the same units in the same order.

        Args:
            evaluates: whether it is for a forward without gradients, which ranks compare.

        Raises:
            DistBackendError: if the collective failed.
        """
        if self.is_gathered or self._works is not None:
            return
        if self.is_lent:
            # The values are here, but other ranks need this rank's part. Those who have the memory may read it now.
            self._keep_own_part()
            self._target = torch.empty_like(self._buffer)
        else:
            self._buffer.untyped_storage().resize_(self.nbytes)
            self._stream, self._target = get_accelerator().current_stream(), self._buffer
        self._send(evaluates)

    def have_all_come(self) -> bool:
        """Whether all ranks have come to the gather that was started."""
        return self._comparison.is_completed()

    def _send(self, evaluates=False, sends_frozen=True):
        works: List[Any] = []
        with collective(PURPOSE):
            # First, because parts of different units may differ in size.
            self._comparison.start(evaluates)
            if self._frozen_bytes and sends_frozen:
                frozen = self._target[: self._frozen_bytes]
                works.append(dist.all_gather_into_tensor(frozen, self.share, group=self._group, async_op=True))
            if self._trained:
                with grouped(self._group, self._device) as messages:
                    # Memory that others have may hold values from before a step.
                    for owner, message in self._trained.messages(self._buffer):
                        source = dist.get_global_rank(self._group, owner)
                        messages.append(dist.broadcast(message, src=source, group=self._group, async_op=True))
                works += messages
        self._works = works

    def refresh(self) -> None:
        """Called on all ranks when partitions hold new values of the trained parameters."""
        if not (self._trained and self._is_shared):
            return
        if not self.is_gathered and self._works is None:
            return
        if not self.is_gathered:
            # What is on its way has the values of before.
            self.finish_gather()
        stream = get_accelerator().current_stream()
        for reader in self._readers:
            if reader != stream:
                stream.wait_stream(reader)
        self._readers = [stream]
        for place in self._all_places():
            if place.is_trained and not place.is_in(self._buffer):
                place.tensor.data = place.memory_in(self._buffer)
        self._target = self._buffer
        # Frozen ones may have been changed here since they were gathered.
        self._send(sends_frozen=False)
        # Nobody gives the memory back now, and a caller may keep views of it, such as a state dict.
        self._wait(until_free=False)
        for place in self._all_places():
            if place.is_trained:
                place.version = version_of(place.tensor)

    def finish_gather(self) -> None:
        """Makes the current stream, and on a CPU the calling thread, wait until the unit is gathered.

        Raises:
            DistBackendError: if the parameters could not be received.
        """
        if not self._is_shared:
            return
        stream = get_accelerator().current_stream()
        if not self.is_gathered:
            if self._works is None:
                # Whoever finishes a gather has begun it, unless the engine has ended and begins none.
                raise ended(self.name)
            self._wait()
            self.unmark()
            self.is_gathered = True
            self._readers = [stream]
            for place in self._all_places():
                place.version = version_of(place.tensor)
        elif stream in self._readers:
            return
        else:
            stream.wait_stream(self._readers[0])
            self._readers.append(stream)
        if stream != self._stream:
            # Otherwise the allocator could give the memory away, when it is resharded, while this stream reads it.
            self._buffer.record_stream(stream)

    def _wait(self, until_free=True):
        """Waits for a gather that was started.

        ``until_free``: whether also, on a CPU, until gloo's thread has let go of the unit's memory, so that whoever
        has a view of it then is a caller.
        """
        if self._works is None:
            return
        self._comparison.wait()
        with collective(PURPOSE):
            # No variable keeps a collective, which keeps the memory. One that failed stays, so that every later wait
            # raises too.
            while self._works:
                self._works[-1].wait()
                self._works.pop()
        if not self._target.is_cpu:
            # Only this stream waits for the gather, which writes into memory of the stream that began it.
            self._target.record_stream(get_accelerator().current_stream())
        is_by_thread = until_free and self._target is self._buffer and self._target.is_cpu
        self._works = self._target = None
        if is_by_thread:
            # Gloo says that the gather is done a moment before its thread lets go of the memory. Until then, free()
            # would take the thread for someone who has a view.
            storage, until = self._buffer.untyped_storage(), time.monotonic() + LONGEST_HELD
            while self._others_have_views(storage) and time.monotonic() < until:
                time.sleep(0.0001)

    def reshard(self) -> None:
        """Frees the memory of the unit. What this stream was told to compute with it is computed before.

        The values that the parameters have now are kept. A parameter that has another dtype or shape leaves the unit.
        """
        if not self._is_shared:
            return
        # A gather that is on its way still writes.
        self._wait()
        if self.is_gathered:
            are_moved = self._take_back()
            if are_moved or self.is_used or self._are_changed():
                self._keep_own_part()
            self.mark()
        self.is_gathered = self.is_used = False
        self.free()

    def mark(self) -> None:
        """Has the parameters raise when they are read."""
        for name in self._places:
            mark_resharded(self._parameters[name], name, self)

    def unmark(self) -> None:
        """Undoes :meth:`mark`."""
        for name in self._places:
            unmark(self._parameters[name])

    def keep(self, owner: Any) -> None:
        """Has parameters at rest keep the unit, and who gathers it, as long as they live."""
        for name in self._places:
            keep_owner(self._parameters[name], owner, self)

    def free(self) -> None:
        """Frees the memory of a unit that is not gathered, unless others have views of it."""
        storage = self._buffer.untyped_storage()
        if self.is_gathered or self._works is not None or not storage.nbytes():
            return
        was_lent, self.is_lent = self.is_lent, self._others_have_views(storage)
        if self.is_lent:
            return
        if was_lent:
            self._keep_own_part()
        self._give_back(storage)

    def _others_have_views(self, storage):
        # Views have the buffer's storage too: the buffer, others of it, parameters, and what stands for these.
        in_buffer = sum(place.home is None for place in self._all_places())
        views = 1 + len(self._typed) + in_buffer + len(self._aliases)
        return users_of(storage) > views

    def _give_back(self, storage):
        if storage.resizable():
            storage.resize_(0)
            return
        # Torch does not resize a storage of which a NumPy array was made, so take another one.
        with torch.inference_mode(False), without_torch_function():
            self._set_buffer(torch.empty_like(self._buffer))
            for place in self._all_places():
                if place.home is None:
                    place.tensor.data = place.memory_in(self._buffer)
        self._aliases.clear()
        self._buffer.untyped_storage().resize_(0)

    # Values --------------------------------------------------------------------------------------------------------

    def _are_changed(self):
        """Whether a parameter was changed in place since the unit was gathered, such as by load_state_dict()."""
        return any(version_of(place.tensor) != place.version for place in self._all_places())

    def take_back(self) -> None:
        """Moves the values of parameters that were given other memory back, while the unit is gathered."""
        if self._is_shared and self._take_back():
            self._keep_own_part()

    def _take_back(self):
        """Returns whether a parameter was given other memory, and moves it back. Parameters of another kind leave."""
        for name, places in [*self._places.items()]:
            if all(place.is_as_made for place in places):
                continue
            if places[0].is_trained:
                # The next step would bring it back.
                warn(ANOTHER_KIND_OF_TRAINED.format(name))
                places[0].tensor.data = places[0].memory_in(self._buffer)
            else:
                warn(ANOTHER_KIND.format(name))
                del self._places[name]
        moved = [place for place in self._all_places() if not place.is_in(self._buffer)]
        for place in moved:
            memory = place.memory_in(self._buffer)
            if memory.device == place.tensor.device and torch.equal(memory, place.tensor.detach()):
                place.tensor.data = memory
                continue
            place.move_into(self._buffer)
            # A backward that has saved the values before these would read the new ones: it must raise.
            torch.autograd.graph.increment_version(place.tensor)
        return bool(moved)

    def _keep_own_part(self):
        begin = self._rank * self._share_bytes
        self.share.copy_(self._buffer[begin : begin + self._share_bytes])

    @property
    def name(self) -> str:
        """Of the first parameter."""
        return next(iter(self._places))

    def _all_places(self):
        return itertools.chain.from_iterable(self._places.values())

    def trains(self, name: str) -> bool:
        """Whether the optimizer has a parameter."""
        return any(place.is_trained for place in self._places.get(name, ()))

    def parameter(self, name: str) -> Parameter:
        """Returns a parameter, also one that has left the unit."""
        return self._parameters[name]

    def note_alias(self, alias: torch.Tensor) -> None:
        """Called if a tensor that cannot be read has the unit's memory, which it needs not have."""
        for tensor in plain_tensors([alias]):
            if address_of(tensor.untyped_storage()) == address_of(self._buffer.untyped_storage()):
                self._aliases[id(tensor)] = tensor

    def forget_alias(self, alias: torch.Tensor) -> None:
        """Called if such a tensor gets other memory, or can be read."""
        for tensor in plain_tensors([alias]):
            self._aliases.pop(id(tensor), None)

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
            with without_torch_function():
                # A backward that has read the old values is wrong.
                torch.autograd.graph.increment_version(place.tensor)

    def _write(self, place, source):
        if self.is_lent or place.home is not None:
            place.memory_in(self._buffer).copy_(source)
            return
        if place.is_trained:
            # Its owners write it.
            return
        begin = self._rank * self._share_bytes
        first, last = max(place.begin, begin), min(place.end, begin + self._share_bytes)
        if first >= last:
            return
        values = source.to(place.dtype).expand(place.shape).contiguous().view(-1).view(torch.uint8)
        self.share[first - begin : last - begin].copy_(values[first - place.begin : last - place.begin])

    # What autograd saves -------------------------------------------------------------------------------------------

    def find(self, offset: int) -> "Tuple[Unit, Place]":
        """Returns the place at an offset in bytes in the buffer, and its unit."""
        return self, self._in_buffer[bisect.bisect_right(self._begins, offset) - 1]

    def tensor_at(
        self, place: Place, dtype: torch.dtype, size: torch.Size, stride: Tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """Returns a tensor in the memory of a place of the unit, which is gathered. ``offset``: in elements of the
        dtype, in the storage."""
        if place.home is not None:
            return place.home.memory.view(dtype).as_strided(size, stride, offset)
        buffer = self._typed.get(dtype)
        return (self._buffer.view(dtype) if buffer is None else buffer).as_strided(size, stride, offset)

    def gather_for_backward(self, schedule: Any = None) -> None:
        """Called when a backward reads the unit. ``schedule``: the pass in which what it reads was saved."""
        if self.owner is not None:
            self.owner.passes.gather_for_backward(self, schedule)
        if not self.is_gathered:
            raise RuntimeError(
                f"the engine was destroyed before this backward, which needs parameter {self.name}; run the backward "
                "before destroy(), or the forward again with another engine of the model"
            )
        self.finish_gather()
