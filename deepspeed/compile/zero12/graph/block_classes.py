# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The class that a module has while a block is compiled by itself, and the class that the module had before."""

import copyreg

from torch.nn import Module


def plain_class(module: Module) -> type:
    """Returns the class that a module had before :func:`compile_blocks`."""
    return getattr(type(module), "class_before_compiling", type(module))


def _new(cls, *arguments):
    return cls.__new__(cls, *arguments)


def subclass(plain: type, **members) -> type:
    """Returns a subclass of ``plain`` with these members, whose instances are copied and pickled as ``plain``."""

    def as_plain(self, protocol):
        # A copy belongs to no engine, whose graphs would reduce its gradients, and this class cannot be pickled.
        function, arguments, *rest = plain.__reduce_ex__(self, protocol)
        # Which insists on an object's own class.
        function = _new if function is copyreg.__newobj__ else function
        return function, tuple(plain if argument is type(self) else argument for argument in arguments), *rest

    kept = {"class_before_compiling": plain, "__module__": plain.__module__, "__reduce_ex__": as_plain}
    return type(plain.__name__, (plain,), {**kept, **members})
