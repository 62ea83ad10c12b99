# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ends code that takes too long."""

import contextvars
import ctypes
import sys
import threading
from typing import Any, Callable, List
from unittest.mock import patch


class OutOfTime(BaseException):
    """The code took too long. It is no Exception, so that torch's handlers of errors let it pass."""


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Calls a function in a thread that ends after so many seconds, and returns its result or raises its error.

    What ends a thread at any place may leave torch's modes entered. Torch keeps them by thread, so the caller's stay.

    Raises:
        OutOfTime: if the function has not returned by then.
    """
    results: List[Any] = []
    errors: List[BaseException] = []
    context, hook = contextvars.copy_context(), sys.unraisablehook
    ended, dropped = threading.Event(), threading.Event()

    def run():
        try:
            results.append(context.run(function))
        except BaseException as error:  # noqa: BLE001  the caller's thread raises it
            errors.append(error)
        finally:
            ended.set()

    def report(unraisable):
        if unraisable.exc_type is OutOfTime:
            dropped.set()
        else:
            hook(unraisable)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        # Not join(): a thread whose join() was interrupted counts as ended.
        ended.wait(min(seconds, threading.TIMEOUT_MAX))
    finally:
        # Also if the user interrupts. Again where Python drops what a callback of a weak reference raises, and
        # otherwise a second later: what puts things back as they were must run. A thread in native code is left alone.
        with patch.object(sys, "unraisablehook", report):
            for number in range(50):
                if not ended.is_set() and (number % 10 == 0 or dropped.is_set()):
                    dropped.clear()
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(OutOfTime)
                    )
                ended.wait(0.1)
    for error in errors:
        raise error
    if not results:
        raise OutOfTime
    return results[0]
