# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Functions that run in threads of their own. What one raises is raised where it was started."""

import contextlib
import threading
import time


def in_threads(functions, failed=lambda: None):
    """Calls each in a thread of its own, all at once; raises what the first of them raised.

    ``failed``: called behind each that raised, for example to end the others' waits.
    """
    ready, errors = threading.Barrier(len(functions)), []

    def call(function):
        ready.wait()
        try:
            function()
        except BaseException as error:  # noqa: B902 (raised below)
            errors.append(error)
            failed()

    threads = [threading.Thread(target=call, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def meanwhile(function):
    """Calls ``function()`` again and again in another thread; yields a list that grows with each call."""
    done, calls, errors = threading.Event(), [], []

    def call():
        try:
            while not done.is_set():
                function()
                calls.append(None)
                # Else it takes a whole core while the other thread waits.
                time.sleep(1e-4)
        except BaseException as error:  # noqa: B902 (raised below)
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield calls
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]
