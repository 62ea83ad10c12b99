# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes compiled code notice hooks that are added to modules, or removed, after the code was compiled.

Dynamo leaves guards of modules without hooks out, unless its option ``skip_nnmodule_hook_guards`` is off. These guards
cost the host time in each call, so other people's code keeps the option as it is.
"""

import threading
from typing import Set

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler


def guard() -> None:
    """Called by the backend: has Dynamo guard hooks in the compilation under way, and in no other.

    Dynamo makes guards after the backend has returned. So the option is set back when the compilation ends.
    """
    if not torch._dynamo.config.skip_nnmodule_hook_guards:
        return
    if _set_back not in callback_handler.end_callbacks:
        # This is the first compilation of all, or torch._dynamo.reset() has dropped all callbacks.
        callback_handler.register_end_callback(_set_back)
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    _guarding.add(threading.get_ident())


def _set_back(_args: CallbackArgs) -> None:
    if threading.get_ident() in _guarding:
        _guarding.discard(threading.get_ident())
        torch._dynamo.config.skip_nnmodule_hook_guards = True


# Threads with a compilation under way: the option is one of each thread.
_guarding: Set[int] = set()
