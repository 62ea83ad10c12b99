# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Parameters that are still being gathered: code that reads or writes one waits for it.

Such a parameter gets a subclass of its own class, with :class:`Arriving` first, whose ``__torch_function__`` sees
every call from Python. The parameter stays the same object, which modules, optimizers and callers hold.

Two kinds of code read without waiting: code that uses an older tensor with the same memory, and C++ functions that do
not check the parameter for ``__torch_function__``.
"""

import functools
from typing import TYPE_CHECKING, Any, Iterable, Iterator, NamedTuple, Optional, Type

import torch

from .guards_of_callers import Awaited, gate, wait_in_guards
from .without_values import WITHOUT_VALUES

if TYPE_CHECKING:
    from torch import Tensor as _NextClass
else:
    _NextClass = object


class Arrival(NamedTuple):
    """The object that waits for a parameter, and the parameter's unit."""

    gather: Awaited
    unit: int


class InFront(_NextClass):
    """A class before that of a tensor. The tensor stays the same object, which modules, optimizers and callers hold:
    as_subclass() makes another one, and torch.utils.swap_tensors() refuses a tensor that has weak references, as those
    of DeepSpeed."""

    own_class: Type[torch.Tensor]


def put_in_front(tensor: torch.Tensor, kind: Any, **attributes: Any) -> None:
    """Puts a class before that of a tensor, unless it is there."""
    # Set these before the class: another thread that sees the class reads them.
    vars(tensor).update(attributes)
    tensor.__class__ = _in_front(kind, type(tensor))  # type: ignore[arg-type]


def take_from_front(tensor: torch.Tensor, kind: Any, attribute: str) -> None:
    """Undoes :func:`put_in_front`. A pickle of the tensor has all of its attributes."""
    of_tensor: Any = type(tensor)
    # Another thread may do the same.
    if issubclass(of_tensor, kind):
        tensor.__class__ = of_tensor.own_class
        vars(tensor).pop(attribute, None)


@functools.cache
def _in_front(kind, own):
    return own if issubclass(own, kind) else type(own)(own.__name__ + kind.__name__, (kind, own), {"own_class": own})


class Arriving(InFront):
    """The mixin of a parameter that is being gathered."""

    # None for a tensor of this class that was made without ``__new__()``. A parameter has its own.
    _arrival: Optional[Arrival] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a tensor of the parameter's own class: code that copies a parameter calls the parameter's class."""
        return cls.own_class(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle contains all attributes, and without the class there is no `_arrival`.
        return _with_values(type(self).own_class.__reduce_ex__, (self, protocol), {})

    @classmethod
    def __torch_function__(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo traces this branch too. There guards wait.
        if not torch.compiler.is_dynamo_compiling():
            if is_traced():
                wait_in_guards()
            if function not in WITHOUT_VALUES:
                return _with_values(function, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


def is_traced() -> bool:
    """Whether Dynamo traces the running code. ``torch.compiler.is_compiling()`` is false in code that Dynamo runs
    itself, such as a function of a tensor that it inspects."""
    return torch._guards.TracingContext.try_get() is not None


def _with_values(function: Any, args: Any, kwargs: Any) -> Any:
    """Waits for the parameters among arguments, and calls a function for which they have their own class.

    Not a tensor that was never sent, nor any while Dynamo traces: then guards must read the class from before.
    """
    found = list(_arriving_among((args, kwargs) if kwargs else args))
    # Another thread may have waited for a parameter by now.
    sent = [(parameter, arrival) for parameter in found if (arrival := getattr(parameter, "_arrival", None))]
    keeps = is_traced()
    for _, arrival in sent:
        (arrival.gather.receive if keeps else arrival.gather.arrive)(arrival.unit)
    if keeps or len(sent) < len(found):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    unmark(found)
    try:
        return function(*args, **kwargs)
    finally:
        for parameter, arrival in sent:
            arrival.gather.mark_again(parameter, arrival)


def _arriving_among(value: Any) -> Iterator["Arriving"]:
    # Do not use torch's trees, which take subclasses of lists for leaves.
    if isinstance(value, Arriving):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _arriving_among(entry)
    elif isinstance(value, dict):
        yield from _arriving_among(list(value.values()))


def can_be_marked(parameter: torch.Tensor) -> bool:
    """Whether :func:`mark` makes reads of a parameter wait.

    Not for tensor subclasses with a ``__torch_function__`` or ``__torch_dispatch__`` of their own, whose values may
    lie in other tensors.
    """
    kind = type(parameter)
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
        return False
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    try:
        parameter.__class__ = _in_front(Arriving, kind)  # type: ignore[arg-type]
        parameter.__class__ = kind
    except TypeError:
        # For example, a class that refuses subclasses.
        return False
    return True


def mark(parameters: Iterable[torch.Tensor], arrival: Arrival) -> None:
    """Makes code that reads or writes one of these parameters wait. :func:`can_be_marked` must hold for each."""
    gate.awaited.add(arrival.gather)
    for parameter in parameters:
        put_in_front(parameter, Arriving, _arrival=arrival)


def unmark(parameters: Iterable[torch.Tensor]) -> None:
    """Undoes :func:`mark`."""
    for parameter in parameters:
        take_from_front(parameter, Arriving, "_arrival")
