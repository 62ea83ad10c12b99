# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of a unit: one buffer for all of its parameters.

When the unit is resharded, the buffer's storage is shrunk to nothing, and the parameters, which are views of it, stay
as they are. If anyone else has a view of that memory, such as a state dict or a NumPy array, the memory stays as it
is, and the values there remain those of the parameters. So it does if autograd has saved a parameter itself: code that
reads whole parameters outside of the engine's passes, such as a penalty between a forward and its backward, has no
hooks of saved tensors, and the backward would read memory that was given back.
"""

import bisect
import dataclasses
import itertools
import operator
import weakref
from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import torch
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator

from ...fixes.base.subclasses import BROADCAST_LATER, plain_tensors
from ...zero_1_and_2.gradient.native import users_of
from ...zero_1_and_2.layout import Layout
from ...zero_1_and_2.messages import warn
from .at_rest import NOT_TRAINED
from .segments import Segment, aligned

ANOTHER_KIND_OF_TRAINED = (
    "trained parameter {} was given another dtype or shape, which compile.shard_parameters does not keep: it has its "
    "dtype, shape and values from before again; change its values in place, or make another engine of the model"
)
ANOTHER_KIND = (
    "parameter {} was given another dtype or shape, so compile.shard_parameters no longer shards it: it stays whole "
    "on every rank"
)


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
# Address of a storage -> the UnitMemory that has it. data_ptr() is 0 of every storage whose memory was given back, and
# Python's object of a storage comes and goes.
KNOWN_STORAGES: "weakref.WeakValueDictionary[int, UnitMemory]" = weakref.WeakValueDictionary()


class UnitMemory:
    """Where the parameters of a unit lie, as bytes, whatever their dtypes.

    Args:
        frozen, trained: name -> parameter, all contiguous. The optimizer has the trained ones.
        rank, world: this rank, and how many share the parameters. A single rank has no buffer, and keeps all.
        device: on which the buffer is. Parameters may be on the host until :meth:`take_in`.
        groups: of each parameter group, its layout and its dtype; empty if trained parameters stay whole.

    Attributes:
        nbytes: of the whole unit, with padding.
        frozen, trained: segments: of all frozen parameters, as bytes, and of the trained ones of each group.
        buffer: all, 1-D and of bytes. None before :meth:`take_in`.
        has_external_views: whether others had the memory when the unit was resharded: views of it, or a parameter
            that autograd has saved. The memory holds the parameters' values then, and those who have it may change
            these.
        external_views_are_current: whether trained parameters in that memory have had no step since.
        asked: the names of frozen parameters of which someone has asked, without gradients, that they be trained.
    """

    def __init__(
        self,
        frozen: Dict[str, Parameter],
        trained: Dict[str, Parameter],
        groups: Sequence[Tuple[Layout, torch.dtype]],
        rank: int,
        world: int,
        device: torch.device,
    ):
        self._parameters = {**frozen, **trained}
        self._device, self.is_shared = device, world > 1
        # Name of a parameter -> the slots of its tensors: of a subclass, those of the plain tensors inside.
        self._slots: Dict[str, List[TensorSlot]] = {}
        nbytes = 0
        for name, parameter in frozen.items():
            self._slots[name] = []
            for tensor in plain_tensors([parameter]):
                self._slots[name].append(TensorSlot(name, tensor, nbytes, nbytes + tensor.nbytes))
                nbytes += aligned(tensor.nbytes)
        self.frozen = Segment(0, torch.uint8, [(aligned(-(-nbytes // world)), 0)], rank, world)
        self.nbytes = self.frozen.end
        self.trained: List[Segment] = []
        names = {id(parameter): name for name, parameter in trained.items()}
        for group, (layout, dtype) in enumerate(groups):
            places = [place for place in layout.places if id(place.parameter) in names]
            if places:
                shards = [(place.shard, place.offset) for place in places]
                segment = Segment(self.nbytes, dtype, shards, layout.rank, layout.world, group)
                for place, (first, _, _) in zip(places, segment.runs(), strict=True):
                    name, begin = names[id(place.parameter)], segment.begin + first * dtype.itemsize
                    end = begin + place.numel * dtype.itemsize
                    self._slots[name] = [TensorSlot(name, place.parameter, begin, end, is_trained=True)]
                self.trained.append(segment)
                self.nbytes = aligned(segment.end)
        self._in_order = sorted(self.slots(), key=begin_of)
        # What autograd may save that lies in the buffer: parameters, and tensors inside those of a subclass.
        both = ((id(held), held) for slot in self._in_order for held in (slot.tensor, self._parameters[slot.name]))
        self._savable: List[torch.Tensor] = [*dict(both).values()]
        # How often each of these was kept before anyone could read it.
        self._holders: List[int] = []
        self.buffer: Any = None
        self._aliases: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # address of a tensor -> the tensor
        self._stream: Any = None  # on which the buffer's memory was allocated
        self.has_external_views = self.external_views_are_current = False
        self.asked: Set[str] = set()

    @property
    def name(self) -> str:
        """The name of the first parameter, also if that one has left the unit."""
        return next(iter(self._parameters))

    def parameters(self) -> Iterator[Tuple[str, Parameter]]:
        """Yields the name and the parameter of those that have not left the unit."""
        return ((name, self._parameters[name]) for name in self._slots)

    def parameter(self, name: str) -> Parameter:
        """Returns a parameter, also one that has left the unit."""
        return self._parameters[name]

    def trains(self, name: str) -> bool:
        """Whether the optimizer has a parameter."""
        return any(slot.is_trained for slot in self._slots.get(name, ()))

    def refuse_to_train(self) -> None:
        """Raises RuntimeError if a frozen parameter that is sharded is to be trained. Called before a forward."""
        for name in self.asked:
            if self._parameters[name].requires_grad:
                raise RuntimeError(NOT_TRAINED.format(name))
        self.asked.clear()

    def slots(self) -> Iterator[TensorSlot]:
        """Yields the slots of the tensors of all parameters."""
        return itertools.chain.from_iterable(self._slots.values())

    def find(self, offset: int) -> TensorSlot:
        """Returns the slot at an offset in bytes in the buffer."""
        return self._in_order[bisect.bisect(self._in_order, offset, key=begin_of) - 1]

    # The buffer ----------------------------------------------------------------------------------------------------

    def take_in(self) -> bool:
        """Moves the parameters into the buffer, or on a single rank to its device.

        Returns whether other ranks lack values: of frozen parameters that were on the host. Trained ones that were
        there have no values here but this rank's shards, because ``from_host.py`` has cut them.
        """
        from_host = {name for name, held in self._parameters.items() if vars(held).pop(BROADCAST_LATER, False)}
        if not self.is_shared:
            for tensor in plain_tensors(self._parameters[name] for name in from_host):
                tensor.data = tensor.data.to(self._device)
            return False
        self.frozen.own = torch.zeros(self.frozen.own_numel, dtype=torch.uint8, device=self._device)
        self._set_buffer(torch.zeros(self.nbytes, dtype=torch.uint8, device=self._device))
        for slot in self.slots():
            if slot.is_trained and slot.name in from_host:
                slot.tensor.data = slot.memory_in(self.buffer)
            else:
                slot.move_into(self.buffer)
        self.note_holders()
        return any(not self.trains(name) for name in from_host)

    def _set_buffer(self, buffer):
        if self.buffer is not None:
            KNOWN_STORAGES.pop(self.buffer.untyped_storage()._cdata, None)
        self.buffer = buffer
        KNOWN_STORAGES[buffer.untyped_storage()._cdata] = self

    def allocate_target(self) -> torch.Tensor:
        """Returns memory for the gathered unit: the buffer, whose memory it allocates again, unless others view it."""
        if self.has_external_views:
            # The values are here, but other ranks need this rank's part. Those who have the memory may read it now.
            self.keep_own_part(trained_too=self.external_views_are_current)
            # Trained ones are gathered into the buffer. Frozen ones lie before them.
            return self.buffer.new_empty(self.frozen.end)
        self.buffer.untyped_storage().resize_(self.nbytes)
        self._stream = get_accelerator().current_stream()
        return self.buffer

    def note_reader(self, stream: Any) -> None:
        """Called when a stream may read the parameters."""
        if stream != self._stream:
            # Otherwise the allocator could give the memory away, when it is freed, while the stream reads it.
            self.buffer.record_stream(stream)

    def free(self) -> None:
        """Frees the memory, which nobody writes now, unless others have views of it, or autograd a parameter."""
        if not self.buffer.untyped_storage().nbytes():
            return
        had_external_views = self.has_external_views
        # Autograd may have saved a parameter since note_holders(), and not a handle in its place.
        self.has_external_views = self.others_have_views() or any(
            map(operator.gt, self._count_holders(), self._holders)
        )
        if self.has_external_views:
            return
        if had_external_views:
            self.keep_own_part(trained_too=self.external_views_are_current)
        self.external_views_are_current = False
        self._give_back()

    def others_have_views(self) -> bool:
        """Whether anyone else has views of the buffer's memory, or gathers into it."""
        # The buffer, parameters, and what stands for these have the buffer's storage too.
        ours = 1 + sum(1 for _ in self.slots()) + len(self._aliases)
        storage = self.buffer.untyped_storage()
        return users_of(storage) > ours

    def note_holders(self) -> None:
        """Called when the parameters can be read from now on, so that :meth:`free` can tell what autograd saves."""
        if not self.has_external_views:
            self._holders = self._count_holders()

    def _count_holders(self):
        with torch._C.DisableTorchFunctionSubclass():
            # Autograd saves a leaf itself, and not a view of its memory, so users_of() does not count it. Variables of
            # Python count as one.
            return [tensor._use_count() for tensor in self._savable]

    def _give_back(self):
        storage = self.buffer.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
            return
        # Torch does not resize a storage that a NumPy array shares, so take another one.
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            self._set_buffer(torch.empty_like(self.buffer))
            for slot in self.slots():
                slot.tensor.data = slot.memory_in(self.buffer)
        self._aliases.clear()
        self.buffer.untyped_storage().resize_(0)

    def note_alias(self, alias: torch.Tensor) -> None:
        """Called if a tensor that cannot be read has the unit's memory, which it needs not have."""
        for tensor in plain_tensors([alias]):
            if tensor.untyped_storage()._cdata == self.buffer.untyped_storage()._cdata:
                self._aliases[id(tensor)] = tensor

    def forget_alias(self, alias: torch.Tensor) -> None:
        """Called if such a tensor gets other memory, or can be read."""
        for tensor in plain_tensors([alias]):
            self._aliases.pop(id(tensor), None)

    # Values --------------------------------------------------------------------------------------------------------

    def note_versions(self, of_frozen: bool = True) -> None:
        """Called when the unit is gathered, so that :meth:`are_changed` can tell later changes."""
        for slot in self.slots():
            if slot.is_trained or of_frozen:
                slot.version = slot.tensor._version

    def are_changed(self) -> bool:
        """Whether a parameter was changed in place since the unit was gathered, such as by load_state_dict()."""
        return any(slot.tensor._version != slot.version for slot in self.slots())

    def keep_own_part(self, trained_too: bool = False) -> None:
        """Copies the values that parameters have in the buffer into this rank's shards: of frozen ones, and of trained
        ones if ``trained_too``."""
        for segment in (self.frozen, *(self.trained if trained_too else ())):
            segment.keep_own_part(self.buffer)

    def take_trained_back(self) -> None:
        """Puts trained parameters that were given other memory back into the unit. Drops the values in that memory."""
        for slot in self.slots():
            if slot.is_trained and not slot.is_in(self.buffer):
                slot.tensor.data = slot.memory_in(self.buffer)

    def take_back(self) -> bool:
        """Moves the values of parameters that were given other memory back, while the unit is gathered.

        Parameters of another dtype or shape leave the unit. Returns whether values were moved.
        """
        if not self.is_shared:
            return False
        for name, slots in [*self._slots.items()]:
            if all(slot.is_as_made for slot in slots):
                continue
            if slots[0].is_trained:
                # The next step would bring it back.
                warn(ANOTHER_KIND_OF_TRAINED.format(name))
                slots[0].tensor.data = slots[0].memory_in(self.buffer)
            else:
                warn(ANOTHER_KIND.format(name))
                del self._slots[name]
        moved = [slot for slot in self.slots() if not slot.is_in(self.buffer)]
        for slot in moved:
            memory = slot.memory_in(self.buffer)
            if memory.device == slot.tensor.device and torch.equal(memory, slot.tensor.detach()):
                slot.tensor.data = memory
                continue
            slot.move_into(self.buffer)
            # A backward that has saved the values before these would read the new ones: it must raise.
            torch.autograd.graph.increment_version(slot.tensor)
        return bool(moved)

    def write(self, name: str, values: torch.Tensor) -> None:
        """Writes this rank's part of a parameter's new values, at rest.

        Raises:
            ValueError: if the values are not made of tensors as the parameter is.
        """
        slots = self._slots[name]
        sources = list(plain_tensors([values]))
        if len(sources) != len(slots):
            raise ValueError(f"parameter {name} is made of {len(slots)} tensors, and its new values are not")
        for slot, source in zip(slots, sources, strict=True):
            if self.has_external_views:
                slot.memory_in(self.buffer).copy_(source)
            values = source.to(slot.dtype).expand(slot.shape).contiguous().view(-1).view(torch.uint8)
            for segment in (self.frozen, *self.trained):
                segment.write(slot.begin, values)
            with torch._C.DisableTorchFunctionSubclass():
                # A backward that has read the old values is wrong.
                torch.autograd.graph.increment_version(slot.tensor)
