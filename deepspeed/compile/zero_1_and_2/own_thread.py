# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Calls a function outside of all contexts that the caller has opened."""

import contextvars
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, TypeVar

from deepspeed.accelerator import get_accelerator

Result = TypeVar("Result")


def in_own_thread(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Calls a function in a new thread, waits for it, and returns its result or raises its error.

    Torch keeps a caller's contexts by thread: modes such as FakeTensorMode, transforms of ``torch.func``, hooks of
    saved tensors, autocast, inference mode, default devices. A new thread has none. It gets the caller's device,
    stream and context variables. The caller sees changes of these variables, because Dynamo keeps its options there.
    """
    accelerator, context = get_accelerator(), contextvars.copy_context()
    device, stream = accelerator.current_device(), accelerator.current_stream()

    def call():
        accelerator.set_device(device)
        with accelerator.stream(stream):
            return function(*args, **kwargs)

    # A caller that is interrupted waits until the function has ended, so nothing is left half done.
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(context.run, call).result()
        finally:
            for variable, value in context.items():
                if variable.get(None) is not value:
                    variable.set(value)
