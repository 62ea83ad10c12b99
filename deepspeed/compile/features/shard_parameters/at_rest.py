# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Parameters whose memory is given back: they answer for shape and dtype, and raise an error when they are read.

Torch reads memory that a storage does not have without a check, and the process dies. A parameter at rest therefore
has another class, :class:`Resharded` before its own, whose ``__torch_function__`` sees every call from Python.

A call that needs values gets them: within a forward or a backward, which all ranks run alike, the parameter's unit is
gathered for it. Elsewhere the unit is gathered for this one call, if all ranks make it (``joint_reads.py``).
"""

import contextlib
import copy
import itertools
import traceback
import weakref
from typing import Any, Tuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...fixes.base.subclasses import plain_tensors
from ...zero_1_and_2.gradient.backward import in_backward
from ..overlap_gather.arriving import InFront, is_traced, put_in_front, take_from_front
from ..overlap_gather.without_values import WITHOUT_VALUES

# Functions that need no values of a tensor at rest, beside those of WITHOUT_VALUES.
_DESCRIBE = {"is_complex", "untyped_storage"}
_LIKE = {"full_like", "reshape_as", "view_as", "expand_as", "type_as", "new_full", "new_tensor"}
# Functions that return a tensor of the same values, or a copy.
_SAME_VALUES = {"detach", "clone", "cpu", "cuda", "to", "contiguous"}
# Functions that say where values lie, which is nowhere for long.
_PLACES = {"data_ptr", "storage", "_typed_storage"}
# Attributes that are tensors of the parameter's values.
_VALUES = {"T", "mT", "H", "mH", "real", "imag"}
# The attribute of a tensor at rest that has its :class:`_ParamRef`.
_SHARD = "_shard_at_rest"
# How many calls lie at most between a module that is moved and a function of its parameter.
CALLS_WITHIN = 8
# The module of torch's that has get_model_state_dict().
CHECKPOINTS = "torch.distributed.checkpoint.state_dict"
# Why code that reads a parameter at rest raises. The texts take the parameter's name, and what cannot be done with it.
NOT_HERE = (
    "parameter {} is sharded over the ranks by compile.shard_parameters and cannot be {} here; do it within `with "
    "unsharded_parameters(engine):` of deepspeed.compile.features.shard_parameters, which all ranks enter together"
)
NOT_SAVED = (
    f"{NOT_HERE}, or save with engine.save_checkpoint(), engine.save_16bit_model() or Accelerate's get_state_dict(), "
    "which all ranks call"
)
NOT_TRAINED = (
    "parameter {} is sharded over the ranks by compile.shard_parameters and cannot be trained; set requires_grad "
    "before the engine is made"
)
_NOT_ALONE = (
    "parameter {} is sharded over the ranks by compile.shard_parameters and cannot be {} by some ranks alone; do it "
    "on all ranks, or within `with unsharded_parameters(engine):` of deepspeed.compile.features.shard_parameters, "
    "which all ranks enter together"
)
_NOT_COMPILED = (
    "parameter {} is sharded over the ranks by compile.shard_parameters, and compiled code cannot gather it; call "
    "that code within `with unsharded_parameters(engine):` of deepspeed.compile.features.shard_parameters, which all "
    "ranks enter together"
)
_NO_COPY = (
    "a copy of parameter {} was made while compile.shard_parameters had the parameter sharded over the ranks, so it "
    "has no values and cannot be {}; make it within `with unsharded_parameters(engine):` of "
    "deepspeed.compile.features.shard_parameters"
)
ENDED = (
    "parameter {} is sharded over the ranks by compile.shard_parameters, and its engine was destroyed; make another "
    "engine of the model, or destroy the engine within `with unsharded_parameters(engine):` to use the model without "
    "one"
)


class _ParamRef:
    """The parameter for whose values a tensor at rest stands.

    Args:
        name: of the parameter.
        unit: the ``Unit`` of the parameter. Only a weak reference is kept, because the unit has the parameters.

    Attributes:
        is_copy: whether the tensor is a copy of the parameter, which later changes of the parameter do not change.
        kept: the unit, when its engine is gone.
    """

    def __init__(self, name: str, unit: Any):
        self.name = name
        self.unit = weakref.ref(unit)
        self.is_copy = False
        self.kept: Any = None

    def gather(self, stack: contextlib.ExitStack) -> bool:
        """Gathers the parameter in a forward or a backward, unless it is here. Returns whether it is here.

        ``stack``: the parameter's unit stays until this ends, whatever else is gathered.
        """
        unit = self.unit()
        if unit is None or self.is_copy:
            return False
        with unit.owner.whole.in_use(unit):
            if isinstance(unit.memory.parameter(self.name), Resharded):
                if in_backward():
                    unit.gather_for_backward()
                elif not unit.owner.passes.gather_for_forward(unit):
                    return False
            # What a hook changes now is kept.
            unit.is_used = True
            stack.enter_context(unit.owner.whole.in_use(unit))
        return True

    def values(self) -> torch.Tensor:
        """Returns the parameter's values, which are here."""
        unit = self.unit()
        assert unit is not None
        return unit.memory.parameter(self.name).detach()

    def write(self, values: torch.Tensor) -> None:
        unit = self.unit()
        if unit is None or self.is_copy:
            raise self.refusal("changed")
        unit.memory.write(self.name, values)

    def gather_with_all(self, stack: contextlib.ExitStack, what: str) -> None:
        """Gathers the parameter outside of forwards and backwards, until ``stack`` ends, if all ranks do. Raises
        RuntimeError if some do not. ``what``: as for :meth:`refusal`."""
        unit = self.unit()
        if unit is None or self.is_copy or not (unit.is_gathered or unit.owner.gather_with_all(unit, stack)):
            # A rank that compiles does not wait for others, which may have compiled this code before.
            raise self.refusal(what, _NOT_COMPILED if is_traced() else _NOT_ALONE)

    def refusal(self, what: str, sentence: str = NOT_HERE) -> RuntimeError:
        """Returns the error for code that reads a tensor at rest.

        ``what`` cannot be done with it. ``sentence``: where neither the engine's end nor a copy is the reason.
        """
        unit = self.unit()
        if unit is not None and unit.owner.is_closed:
            sentence = ENDED
        elif self.is_copy:
            sentence = _NO_COPY
        return RuntimeError(sentence.format(self.name, what))


def refuse_checkpoint(unit: Any, *_: Any) -> None:
    """Hook of a block before its state dict: raises if torch's ``get_model_state_dict()`` takes parameters at rest.

    The first rank alone would read them, and raise, when the others have gone on and wait for it. Torch tells modules
    nothing of this call, so it is looked for on the stack.
    """
    if not unit.is_gathered and any(
        frame.f_globals.get("__name__") == CHECKPOINTS for frame, _ in traceback.walk_stack(None)
    ):
        raise RuntimeError(NOT_SAVED.format(unit.memory.name, "taken by get_model_state_dict()"))


class Resharded(InFront):
    """Comes before the class of a tensor whose memory is given back."""

    # torch's own methods of these names are no calls of torch functions.
    def __deepcopy__(self, memo: Any) -> Any:
        with contextlib.ExitStack() as stack:
            shard = vars(self)[_SHARD]
            if not shard.gather(stack):
                shard.gather_with_all(stack, "copied")
            return copy.deepcopy(shard.values() if isinstance(self, Resharded) else self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        shard = vars(self)[_SHARD]
        with contextlib.ExitStack() as stack:
            # Do not gather with all ranks: pickle reads the memory later.
            if not shard.gather(stack):
                raise shard.refusal("saved", NOT_SAVED)
            return shard.values().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, first = function.__name__, args[0] if args else None
        if name in ("__get__", "__set__", "__delete__"):
            accessed = function.__self__.__name__
            if accessed not in _VALUES and accessed != "data":
                return _access(function, name, args)
            if name == "__set__" and _is_moved(*args):
                # Trainers call `module.cpu()` at their end. There is nothing to move.
                return None
            name = accessed
        elif isinstance(first, Resharded):
            shard = vars(first)[_SHARD]
            if name == "__repr__":
                return f"{type(first).__name__}({shard.name}, {_plain(tuple, first.shape)}, {first.dtype})"
            if name == "requires_grad_":
                first.requires_grad = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
                return first
            if name in _DESCRIBE:
                return _plain(function, *args, **kwargs)
        if function in WITHOUT_VALUES or (
            name in _LIKE and not (name.endswith("_as") and isinstance(first, Resharded))
        ):
            return _plain(function, *args, **kwargs)
        at_rest = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Resharded)]
        shards = [vars(leaf)[_SHARD] for leaf in at_rest]
        with contextlib.ExitStack() as stack:
            if all([shard.gather(stack) for shard in shards]):
                return _call_with_values(function, (args, kwargs), at_rest, shards)
            if isinstance(first, Resharded):
                if name in _SAME_VALUES:
                    same = _call_at_rest(first, function, args, kwargs)
                    if same is not None:
                        return same
                if name == "data" and function.__name__ == "__get__":
                    return _alias(first)
                if name == "copy_" and args[1:] and not isinstance(args[1], Resharded):
                    vars(first)[_SHARD].write(args[1].detach())
                    return first
            what = f"read or changed ({name})"
            # What a module becomes when it is cast is nothing that a unit gathers.
            if name in _PLACES or _moves_module():
                raise shards[0].refusal(what)
            for shard in shards:
                shard.gather_with_all(stack, what)
            return _call_with_values(function, (args, kwargs), at_rest, shards)


def _is_moved(tensor, other):
    """Whether another tensor at rest stands for the values of a tensor at rest, in the same format, on any device."""
    if not (isinstance(tensor, Resharded) and isinstance(other, Resharded)) or other.dtype != tensor.dtype:
        return False
    shard, others = vars(tensor)[_SHARD], vars(other)[_SHARD]
    return (shard.unit, shard.name) == (others.unit, others.name) and not shard.is_copy


def _call_with_values(function, arguments, at_rest, shards):
    """Calls a function with values in place of what was at rest. ``shards``: the references of ``at_rest``."""
    values = {
        # A parameter itself is none at rest any more.
        id(tensor): shard.values() if isinstance(tensor, Resharded) else tensor
        for tensor, shard in zip(at_rest, shards)
    }
    before = {key: _memory_of(value) for key, value in values.items()}
    args, kwargs = tree_map(lambda value: values.get(id(value), value), arguments)
    result = function(*args, **kwargs)
    for tensor in at_rest:
        value = values[id(tensor)]
        if isinstance(tensor, Resharded) and _memory_of(value) != before[id(tensor)]:
            # The function has given the tensor other memory, for example by assigning to `data`.
            _replace(tensor, value)
        if result is value:
            # A function that changes its argument returns it.
            result = tensor
    return result


def _memory_of(tensor):
    """Says where and how the values of a tensor lie."""
    return [
        (plain.untyped_storage()._cdata, plain.storage_offset(), plain.shape, plain.stride(), plain.dtype)
        for plain in plain_tensors([tensor])
    ]


def _replace(alias, values):
    unit = vars(alias)[_SHARD].unit()
    if unit is not None:
        unit.memory.forget_alias(alias)
    unmark(alias)
    alias.data = values


def _access(function, kind, args):
    if kind == "__set__" and function.__self__.__name__ == "requires_grad" and args[1]:
        shard = vars(args[0])[_SHARD]
        unit = shard.unit()
        if unit is None or not unit.memory.trains(shard.name):
            # Without gradients peft asks so, when a program takes another adapter for reference logits. The next
            # forward with gradients looks whether it still does.
            if unit is None or torch.is_grad_enabled():
                raise RuntimeError(NOT_TRAINED.format(shard.name))
            unit.memory.asked.add(shard.name)
    return _plain(function, *args)


def _plain(function, *args, **kwargs):
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _call_at_rest(tensor, function, args, kwargs):
    """Returns what a function of ``_SAME_VALUES`` returns of a tensor at rest; None if that is a copy to be read."""
    # A memory format asks for as many dimensions as the tensor has.
    empty = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    shard = vars(tensor)[_SHARD]
    made = _plain(function, empty, *args[1:], **kwargs)
    if made is empty or function.__name__ == "detach":
        return _alias(tensor)
    if not _moves_module():
        return None
    copied = torch.empty(tensor.shape, dtype=made.dtype, device=made.device)
    copied.untyped_storage().resize_(0)
    of_copy = copy.copy(shard)
    of_copy.is_copy = True
    _put_to_rest(copied, of_copy)
    return copied


def _moves_module():
    """Whether a module is moved, such as by ``module.cpu()``. Only the stack of calls says so."""
    return any(
        frame.f_code.co_name == "_apply" and frame.f_globals.get("__name__") == torch.nn.Module.__module__
        for frame, _ in itertools.islice(traceback.walk_stack(None), CALLS_WITHIN)
    )


def _alias(tensor):
    """Returns another tensor at rest that stands for the same values."""
    shard, alias = vars(tensor)[_SHARD], _plain(tensor.detach)
    unit = shard.unit()
    if unit is not None:
        unit.memory.note_alias(alias)
    _put_to_rest(alias, shard)
    return alias


def _put_to_rest(tensor, shard):
    put_in_front(tensor, Resharded, **{_SHARD: shard})


def stands_for(tensor: Any) -> Tuple[Any, str]:
    """Returns the unit and the name of the parameter for whose values a tensor at rest stands; for others None, ""."""
    shard = vars(tensor)[_SHARD] if isinstance(tensor, Resharded) else None
    return (None, "") if shard is None or shard.is_copy else (shard.unit(), shard.name)


def refusal_of(tensor: torch.Tensor, what: str) -> RuntimeError:
    """Returns the error for a tensor at rest with which something, such as "saved", cannot be done."""
    return vars(tensor)[_SHARD].refusal(what)


def mark_resharded(parameter: torch.Tensor, name: str, unit: Any) -> None:
    """Makes a parameter of a ``Unit`` raise an error when it is read. ``name`` is the parameter's, for errors."""
    _put_to_rest(parameter, _ParamRef(name, unit))


def keep_unit(parameter: torch.Tensor, unit: Any) -> None:
    """Keeps a ``Unit`` alive as long as a parameter at rest lives."""
    if isinstance(parameter, Resharded):
        vars(parameter)[_SHARD].kept = unit


def unmark(parameter: torch.Tensor) -> None:
    """Undoes :func:`mark_resharded`."""
    take_from_front(parameter, Resharded, _SHARD)
