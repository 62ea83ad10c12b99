# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What autograd saves of parameters that are sharded (``compile.shard_parameters``).

Autograd saves a handle in place of a tensor in a unit's memory. A backward that reads the tensor turns the handle into
a tensor again, and the unit is gathered then. So a backward finds the parameters whole whatever way the backward came,
and no saved tensor keeps the memory of a unit. What autograd saves outside of the engine's passes has no handle if the
unit happens to be whole, and keeps the unit's memory (``unit_memory.py``).
"""

import contextlib
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Dict, NamedTuple, Optional, Tuple, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .unit import Unit
from .unit_memory import KNOWN_STORAGES, TensorSlot

if TYPE_CHECKING:
    from .gather_order import GatherOrder

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {} is at version "
    "{}; expected version {} instead"
)


_Function = TypeVar("_Function", bound=Callable)


def _keep_from_compiler(function: _Function) -> _Function:
    """Makes Dynamo run a function, and all that it calls, as they are. Returns the function itself.

    Autograd calls hooks of saved tensors from C++. Where a graph has ended early, Dynamo takes such a hook for code to
    compile. ``torch.compiler.disable()`` returns a wrapper, which takes 3 us for each saved tensor.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


class _Handle(NamedTuple):
    """Stands for a tensor in the memory of a unit.

    Attributes:
        unit: the unit.
        schedule: the pass in which the tensor was saved, if any.
        dtype, size, stride, offset: of the tensor.
        slot, version: of the parameter, and the parameter's version when the tensor was saved; None: not compared.
    """

    unit: Unit
    schedule: Optional["GatherOrder"]
    dtype: torch.dtype
    size: torch.Size
    stride: Tuple[int, ...]
    offset: int
    slot: TensorSlot
    version: Optional[int]

    def tensor(self) -> torch.Tensor:
        self.unit.gather_for_backward(self.schedule)
        if self.version is not None and self.slot.tensor._version != self.version:
            name = f"parameter {self.slot.name}"
            raise RuntimeError(MODIFIED.format(name, self.slot.tensor._version, self.version))
        memory = self.unit.memory.buffer
        # The offset is in elements of the tensor's dtype: a caller may have made complex numbers of a parameter.
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class _Wrapper(NamedTuple):
    """Stands for a tensor that is made of other tensors, some of them in a unit."""

    kind: Any
    context: Any
    size: torch.Size
    stride: Tuple[int, ...]
    inner: Dict[str, Any]

    def tensor(self) -> torch.Tensor:
        inner = {name: _unpack(packed) for name, packed in self.inner.items()}
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)


def _stand_in(tensor, compares):
    """Returns what stands for a tensor, or None if no unit has the tensor. ``compares``: the parameter's versions."""
    if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        return _wrapper(tensor, compares)
    try:
        memory = KNOWN_STORAGES.get(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        # The tensor has no memory of its own, for example because it is sparse.
        return None
    # A lazy conjugate keeps the memory of its unit.
    if memory is None or tensor.is_conj() or tensor.is_neg():
        return None
    offset = tensor.storage_offset()
    slot = memory.find(offset * tensor.element_size())
    unit = None if slot is None else slot.unit()
    if unit is None or unit.owner is None:
        return None
    schedule = unit.owner.passes.pass_that_saves(unit)
    version = slot.tensor._version if compares else None
    return _Handle(unit, schedule, tensor.dtype, tensor.size(), tensor.stride(), offset, slot, version)


def _wrapper(tensor, compares):
    names, context = tensor.__tensor_flatten__()
    tensors = {name: getattr(tensor, name) for name in names}
    stand_ins = {name: _stand_in(part, compares) for name, part in tensors.items()}
    if all(stand_in is None for stand_in in stand_ins.values()):
        return None
    inner = {name: _pack(part) if stand_ins[name] is None else stand_ins[name] for name, part in tensors.items()}
    return _Wrapper(type(tensor), context, tensor.size(), tensor.stride(), inner)


_OURS = "_saves_handles"


def _hooks(pack_other: Callable, unpack_other: Callable, compares: bool) -> Tuple[Callable, Callable]:
    """Returns hooks that leave all tensors but those of units to other hooks. ``compares``: versions of parameters."""

    @_keep_from_compiler
    def pack(tensor):
        stand_in = _stand_in(tensor, compares)
        return pack_other(tensor) if stand_in is None else stand_in

    @_keep_from_compiler
    def unpack(packed):
        return packed.tensor() if isinstance(packed, (_Handle, _Wrapper)) else unpack_other(packed)

    setattr(pack, _OURS, True)
    return pack, unpack


def _with_version(tensor):
    # Not the tensor itself: it may be the result of the node that keeps what is packed, a cycle that nobody collects.
    # Torch compares no versions of tensors that hooks have packed.
    return tensor.detach(), tensor._version


def _of_version(packed):
    tensor, version = packed
    if tensor._version != version:
        name = f"[{tensor.type()} {list(tensor.shape)}]"
        raise RuntimeError(MODIFIED.format(name, tensor._version, version))
    return tensor


_pack, _unpack = _hooks(_with_version, _of_version, compares=True)


def saving_handles() -> ContextManager[Any]:
    """Returns a context in which autograd saves handles in place of tensors in the memory of units.

    Torch calls only the hooks of saved tensors that were registered last. A caller's hooks are called from these.
    """
    # Nothing public returns the hooks of saved tensors, or says whether they may be registered.
    current = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if current is None:
        if not (torch.is_grad_enabled() or torch._C._autograd._saved_tensors_hooks_is_enabled()):
            # Nothing is saved, and torch would not have hooks here.
            return contextlib.nullcontext()
        return saved_tensors_hooks(_pack, _unpack)
    if hasattr(current[0], _OURS):
        return contextlib.nullcontext()
    # Torch compares no versions within a caller's hooks. Checkpointing, for one, computes what was saved again.
    return saved_tensors_hooks(*_hooks(current[0], current[1], compares=False))
