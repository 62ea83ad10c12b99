# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Parameters whose new values are on their way: whoever reads or writes one waits, without knowing of it.

Such a parameter has another class, :class:`Arriving` before its own, whose ``__torch_function__`` sees every call from
Python. It stays the same object, which modules, optimizers and callers hold.

Nothing sees other tensors that share a parameter's memory and were made before, nor functions in C++ that take the
parameter itself without asking for ``__torch_function__``.
"""

import functools
from typing import TYPE_CHECKING, Any, Iterable, Iterator, NamedTuple, Optional, Protocol, Type

import torch

from .guards_of_callers import Awaited, gate, wait_in_guards
from .without_values import WITHOUT_VALUES

if TYPE_CHECKING:
    from torch import Tensor as _NextClass
else:
    _NextClass = object


class Receiver(Awaited, Protocol):
    """What waits for parameters."""

    def receive(self, unit: int) -> None:
        """Waits for the parameters of a unit. They keep their class."""

    def arrive(self, unit: int) -> None:
        """Waits for the parameters of a unit, and gives them their own class back."""


class Arrival(NamedTuple):
    """Who waits for a parameter, and in which unit it comes."""

    gather: Receiver
    unit: int


class Arriving(_NextClass):
    """Comes before the class of a parameter that is on its way."""

    arrived_class: Type[torch.Tensor]
    # A parameter has its own. A tensor has none that somebody made of this class past ``__new__()``.
    _arrival: Optional[Arrival] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a tensor of the class behind this one: whoever copies a parameter calls the class that it has."""
        return cls.arrived_class(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle has all attributes, so first take out the one that says who waits.
        kind: Any = type(self).arrived_class
        _wait_for(self)
        return kind.__reduce_ex__(self, protocol)

    @classmethod
    def __torch_function__(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Dynamo traces this too. Guards wait then.
        if not torch.compiler.is_dynamo_compiling():
            if is_traced():
                wait_in_guards()
            if function not in WITHOUT_VALUES and not _wait_for((args, kwargs)):
                return function(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


def is_traced() -> bool:
    """Whether Dynamo traces the code that runs. ``torch.compiler.is_compiling()`` says no where code runs for Dynamo,
    such as a function of a tensor that it looks at."""
    return torch._guards.TracingContext.try_get() is not None


def _wait_for(arguments: Any) -> bool:
    """Waits for the parameters among arguments. Returns whether a tensor keeps its class.

    Nobody sends such a tensor, or Dynamo looks at it while it traces: guards shall read the class that it has had.
    """
    keeps = is_traced()
    for parameter in _arriving_among(arguments):
        # Another thread may have waited for it by now.
        arrival = getattr(parameter, "_arrival", None)
        if arrival is not None:
            (arrival.gather.receive if keeps else arrival.gather.arrive)(arrival.unit)
    return any(True for _ in _arriving_among(arguments))


def _arriving_among(value: Any) -> Iterator["Arriving"]:
    # Not with torch's trees, whose leaves are subclasses of lists too.
    if isinstance(value, Arriving):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _arriving_among(each)
    elif isinstance(value, dict):
        yield from _arriving_among(list(value.values()))


@functools.cache
def _on_its_way(kind):
    """Returns the class of parameters on their way whose own class is ``kind``."""
    return type(kind)(f"{kind.__name__}Arriving", (Arriving, kind), {"arrived_class": kind})


def can_be_marked(parameter: torch.Tensor) -> bool:
    """Whether :func:`mark` makes reads of a parameter wait.

    It does not for tensor subclasses that say themselves what functions do with them: such may have their values in
    other tensors.
    """
    kind = type(parameter)
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
        return False
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    try:
        parameter.__class__ = _on_its_way(kind)  # type: ignore[arg-type]
        parameter.__class__ = kind
    except TypeError:
        # Such as a class that refuses subclasses.
        return False
    return True


def mark(parameters: Iterable[torch.Tensor], arrival: Arrival) -> None:
    """Makes everybody who reads or writes one of these parameters wait. The parameters :func:`can_be_marked`."""
    gate.awaited.add(arrival.gather)
    for parameter in parameters:
        # Other threads see the class, and then ask for this.
        parameter._arrival = arrival  # type: ignore[attr-defined]
        parameter.__class__ = _on_its_way(type(parameter))  # type: ignore[arg-type]


def unmark(parameters: Iterable[torch.Tensor]) -> None:
    """Undoes :func:`mark`."""
    for parameter in parameters:
        kind = type(parameter)
        if issubclass(kind, Arriving):
            parameter.__class__ = kind.arrived_class
            del parameter._arrival
