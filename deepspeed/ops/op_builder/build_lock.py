# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Lets one process at a time build native code in a folder, also after another process was killed there."""

import contextlib
import operator
import os
import platform
import time
from pathlib import Path
from typing import Iterator

# After so many seconds, a process says what it waits for.
SILENT_SECONDS = 10


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within it, no other process of this fork builds native code in ``folder``.

    Torch marks a folder in which a process builds by a file ``lock``, which names no owner. If the process is killed,
    the file stays, and every later process would wait for it. So a process of this fork first locks a file ``owner``
    and writes its name into it. The kernel unlocks the file when the process ends. A process that has locked ``owner``
    and finds another's name in it knows that this other one was killed, and removes its ``lock``.
    """
    file = None
    # Fails in a folder that this process cannot write, or on a file system without locks.
    with contextlib.suppress(OSError):
        file = _locked(folder / "owner")
    _take_over(folder / "lock", file)
    try:
        yield
    finally:
        if file is not None:
            _unlock(file)


def _locked(path):
    import fcntl

    file = open(path, "a+")

    def is_locked():
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    _wait(is_locked, lambda: f"{_named(_owner(file))}, which builds native code in {path.parent}")
    return file


def _unlock(file):
    import fcntl

    with file:
        file.truncate(0)
        # Closing alone would not unlock the file if a child was forked meanwhile.
        fcntl.flock(file, fcntl.LOCK_UN)


def _take_over(lock, file):
    """Waits until there is no ``lock``, or removes it if its owner is gone; then writes this process's name to a file.

    ``file`` is None if this process could not lock it.
    """
    from deepspeed.utils import logger

    owner, own = _owner(file), [platform.node(), _boot(), str(os.getpid())]
    # Some file systems that hosts share keep locks to each host, so that an owner on another host may be alive.
    # Containers of one host have one boot, and a host that has booted again has its name still.
    if lock.exists() and any(map(operator.eq, owner[:2], own)):
        with contextlib.suppress(OSError):
            lock.unlink()
            logger.warning(f"DeepCompile has removed {lock}: {_named(owner)} was ended while it built native code")
    _wait(
        lambda: not lock.exists(),
        lambda: (
            f"{_named(owner)} to remove {lock}, because it builds native code there; if it was ended, remove the file"
        ),
    )
    if file is not None:
        file.truncate(0)
        file.write("\n".join(own))
        file.flush()


def _owner(file):
    """Returns host, boot and number of the process whose name is in a file, or something shorter."""
    if file is None:
        return []
    file.seek(0)
    return file.read().split("\n")


def _named(owner):
    return f"process {owner[2]} on host {owner[0]}" if len(owner) == 3 else "a process"


def _boot():
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _wait(until, whom):
    from deepspeed.utils import logger

    began, said = time.monotonic(), False
    while not until():
        if not said and time.monotonic() - began > SILENT_SECONDS:
            logger.warning(f"DeepCompile waits for {whom()}")
            said = True
        time.sleep(0.1)
