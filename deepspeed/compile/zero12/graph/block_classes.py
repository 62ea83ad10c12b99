# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Classes that blocks, and the modules that call blocks, have while blocks are compiled by themselves."""

import copyreg
from typing import Any, Type

from torch.nn import Module


def plain_class(module: Module) -> Type[Module]:
    """Returns the class that a module had before ``compile_blocks()``, or else the module's class."""
    return getattr(type(module), "class_before_compiling", type(module))


def _new(cls, *arguments):
    return cls.__new__(cls, *arguments)


def subclass(plain: Type[Module], **members: Any) -> Type[Module]:
    """Returns a subclass of ``plain`` with ``members``, whose instances have copies and pickles of class ``plain``."""

    def as_plain(self, protocol):
        # A copy must not have this class, whose graphs reduce: the copy belongs to no engine. And pickle cannot find
        # this class by name.
        function, arguments, *rest = plain.__reduce_ex__(self, protocol)  # type: ignore[call-arg, str-unpack]
        # copyreg.__newobj__() insists on the object's own class, so use a function that does not.
        function = _new if function is copyreg.__newobj__ else function  # type: ignore[attr-defined]
        return function, tuple(plain if argument is type(self) else argument for argument in arguments), *rest

    kept = {"class_before_compiling": plain, "__module__": plain.__module__, "__reduce_ex__": as_plain}
    return type(plain.__name__, (plain,), {**kept, **members})
