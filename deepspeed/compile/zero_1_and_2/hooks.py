# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Hooks that do something in a module, and nothing in copies and pickles of the module.

torch copies a module's hooks with the module and has no hook that stays behind. In a copy, :data:`no_hook` takes the
place of each :class:`Hook`. It is a function of Python's own, so a pickle of the module can be read without this fork.
"""

import contextlib
from typing import Any, Callable

# Does nothing, whatever it is given.
no_hook = contextlib.nullcontext().__exit__


class Hook:
    """A hook of a module that calls ``function``, but not in copies and pickles of the module."""

    def __init__(self, function: Callable):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> Any:
        return no_hook.__reduce__()
