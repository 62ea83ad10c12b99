# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Parameters whose memory is given back: they answer for shape and dtype, and raise an error when they are read.

Torch reads memory that a storage does not have without a check, and the process dies. A parameter at rest therefore
has another class, :class:`AtRest` before its own, whose ``__torch_function__`` sees every call from Python.
"""

import functools
import weakref
from typing import TYPE_CHECKING, Any, Type

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch import Tensor as _NextClass

    from .unit import Unit
else:
    _NextClass = object

# Functions that need no values, and functions that return tensors of the same values.
_DESCRIBE = {
    *("numel", "nelement", "size", "dim", "ndimension", "stride", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_same_size", "untyped_storage", "__len__"),
}
_SAME_VALUES = {"detach", "clone", "cpu", "to", "contiguous"}
# Attributes that are tensors of the parameter's values.
_VALUES = {"T", "mT", "H", "mH", "real", "imag"}
# The attribute of a tensor at rest that says whose values it stands for.
_SHARE = "_share_at_rest"


class _Share:
    """Whose values a tensor at rest stands for.

    Args:
        name: of the parameter.
        unit: of the parameter. Only a weak reference is kept, because the unit has the parameters.
    """

    def __init__(self, name: str, unit: "Unit"):
        self.name = name
        self.unit = weakref.ref(unit)

    def write(self, values: torch.Tensor) -> None:
        unit = self.unit()
        if unit is None:
            raise self.refusal("changed")
        unit.write(self.name, values)

    def refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"parameter {self.name} is sharded over the ranks by compile.shard_frozen and cannot be {what} here; do "
            "it within `with gathered_parameters(engine):` of deepspeed.compile.zero12, which all ranks enter "
            "together, or save without frozen parameters (exclude_frozen_parameters=True)"
        )


class AtRest(_NextClass):
    """Comes before the class of a tensor whose memory is given back."""

    gathered_class: Type[torch.Tensor]

    # torch's own methods of these names are no calls of torch functions.
    def __deepcopy__(self, memo: Any) -> Any:
        raise vars(self)[_SHARE].refusal("copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise vars(self)[_SHARE].refusal("saved")

    @classmethod
    def __torch_function__(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        if name in ("__get__", "__set__", "__delete__"):
            return _access(function, name, args)
        first = args[0] if args else None
        if isinstance(first, AtRest):
            share = vars(first)[_SHARE]
            if name == "__repr__":
                return f"{type(first).__name__}({share.name}, {_plain(tuple, first.shape)}, {first.dtype})"
            if name in _DESCRIBE:
                return _plain(function, *args, **kwargs)
            if name in _SAME_VALUES:
                return _alias(first)
            if name == "requires_grad_":
                first.requires_grad = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
                return first
            if name == "copy_" and not isinstance(args[1], AtRest):
                share.write(args[1].detach())
                return first
        at_rest = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, AtRest))
        raise vars(at_rest)[_SHARE].refusal(f"read or changed ({name})")


def _access(function, kind, args):
    tensor, name = args[0], function.__self__.__name__
    share = vars(tensor)[_SHARE]
    if kind == "__get__" and name == "data":
        return _alias(tensor)
    if kind == "__get__" and name in _VALUES or kind != "__get__" and name == "data":
        raise share.refusal(f"read or changed ({name})")
    if kind == "__set__" and name == "requires_grad" and args[1]:
        raise RuntimeError(
            f"parameter {share.name} is sharded over the ranks by compile.shard_frozen and cannot be trained; set "
            "requires_grad before the engine is made"
        )
    return _plain(function, *args)


def _plain(function, *args, **kwargs):
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _alias(tensor):
    """Returns another tensor at rest that stands for the same values."""
    alias = _plain(tensor.detach)
    _put_to_rest(alias, vars(tensor)[_SHARE])
    return alias


def _put_to_rest(tensor, share):
    tensor.__class__ = _with_rest(type(tensor))  # type: ignore[arg-type]
    vars(tensor)[_SHARE] = share


@functools.cache
def _with_rest(kind):
    """Returns the class at rest of a class of tensors."""
    if issubclass(kind, AtRest):
        return kind
    return type(kind)(f"{kind.__name__}AtRest", (AtRest, kind), {"gathered_class": kind})


def mark_sharded(parameter: torch.Tensor, name: str, unit: "Unit") -> None:
    """Makes a parameter raise an error when it is read. ``name`` is the parameter's, for errors."""
    _put_to_rest(parameter, _Share(name, unit))


def unmark(parameter: torch.Tensor) -> None:
    """Undoes :func:`mark_sharded`."""
    if isinstance(parameter, AtRest):
        parameter.__class__ = parameter.gathered_class
        # A pickle of the parameter has all of its attributes.
        delattr(parameter, _SHARE)


# What DeepSpeed's engine calls ------------------------------------------------------------------------------------


def place_of(parameter: torch.Tensor) -> int:
    """Called when a checkpoint is saved. Returns a number that two parameters share if they are one in memory."""
    return id(parameter) if isinstance(parameter, AtRest) else parameter.data_ptr()
