# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes compiled code notice changes of modules and parameters after the compilation.

Two of Dynamo's options leave out guards, which cost the host time in each call. This file turns both off for the
engine's compilations only.
"""

import threading
from typing import Dict, Optional

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler

_OPTIONS_THAT_LEAVE_OUT_GUARDS = (
    # Guards of modules that have no hooks yet.
    "skip_nnmodule_hook_guards",
    # With torch 2.11, guards of a parameter as long as the module holds the same object: a frozen parameter that is
    # trained later would get no gradient.
    "skip_tensor_guards_with_matching_dict_tags",
)


def guard_defaults() -> None:
    """Makes Dynamo guard the default arguments of functions, as torch 2.13 does by itself.

    Torch 2.11 leaves these guards out while it traces. So a hook that each layer has with another default would run as
    the first layer's in all of them. Unlike the options above, this stays: any engine may compile at any time.
    """
    if hasattr(torch._dynamo.config, "skip_guards_on_constant_func_defaults"):
        torch._dynamo.config.skip_guards_on_constant_func_defaults = False


def guard_all() -> None:
    """Called when a frame is compiled: makes Dynamo keep all guards in this compilation, and in no other.

    Dynamo makes guards after the backend has returned, so the end of the compilation restores the options.
    """
    if set_back not in callback_handler.end_callbacks:
        # This is the first compilation of all, or torch._dynamo.reset() has dropped all callbacks.
        callback_handler.register_end_callback(set_back)
    options = {name: getattr(torch._dynamo.config, name) for name in _OPTIONS_THAT_LEAVE_OUT_GUARDS}
    _former_options.setdefault(threading.get_ident(), options)
    for name in options:
        setattr(torch._dynamo.config, name, False)


def set_back(_args: Optional[CallbackArgs] = None) -> None:
    """Restores the options of this thread. Called when a compilation ends, and after each call of compiled code.

    While another thread compiles, for example a backward, Dynamo does not report the end of this thread's compilation.
    """
    if _former_options:
        for name, value in _former_options.pop(threading.get_ident(), {}).items():
            setattr(torch._dynamo.config, name, value)


# Thread with a running compilation -> the former values of the options, which are options of each thread.
_former_options: Dict[int, Dict[str, bool]] = {}
