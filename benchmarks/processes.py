# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Starts the rank processes of one run under the launcher of a given DeepSpeed, and ends them."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .results import NoResult, Result, no_result

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent


def end_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit in this process, so that :func:`run` ends the processes it started."""

    def end(number, _frame):
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def run(
    arguments: list[str],
    gpus: list[str],
    processes: int,
    site: str | None,
    caches: Path,
    extensions: Path,
    limit: float,
    log: Path,
    launched: bool = True,
) -> Result | NoResult:
    """Runs benchmarks.measure in processes of its own; returns its result, or why there is none.

    Args:
        arguments: of benchmarks.measure.
        gpus: what :func:`devices.visible_gpus` returned.
        processes: how many ranks to start.
        site: the folder of the DeepSpeed to measure, or None for the one that this environment has.
        caches: a folder for what torch compiles.
        extensions: a folder for native code. Each DeepSpeed needs its own.
        limit: seconds after which the run is ended.
        log: a file for what the run prints.
        launched: whether a launcher starts the ranks. A single rank starts in less time without one.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name, open(log, "w") as output:
        folder = Path(name).resolve()
        # Ranks run in this folder and import this package through the link in it. They must not search the checkout:
        # its folder deepspeed/ holds only the files of this fork, and would hide the whole DeepSpeed of an editable
        # install.
        (folder / PACKAGE.name).symlink_to(PACKAGE, target_is_directory=True)
        file = folder / "result.json"
        environment = {
            **os.environ,
            "PYTHONPATH": _python_path(folder, site),
            "TORCHINDUCTOR_CACHE_DIR": str(caches.resolve() / "inductor"),
            "TRITON_CACHE_DIR": str(caches.resolve() / "triton"),
            "TORCH_EXTENSIONS_DIR": str(extensions.resolve()),
        }
        if not gpus:
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        port = _free_port()
        launcher = [sys.executable, "-m", *_launcher(gpus, processes), "--master_port", str(port), "--module"]
        if not launched:
            launcher = [sys.executable, "-m"]
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        # In a session of its own, the signal that ends it reaches all of its processes.
        process = subprocess.Popen(
            [*launcher, f"{PACKAGE.name}.measure", *arguments, "--json", str(file)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except BaseException as error:
            # DeepSpeed's own builds wait forever for the lock of a process that was ended while it compiled. Locks of
            # other builds in the folder stay.
            locks = _held_locks(process.pid)
            _end(process, port)
            for lock in locks:
                lock.unlink(missing_ok=True)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return no_result(f"not done after {limit:.0f} s, see {log}", failed=True)
        _end(process, port)
        if status or not file.exists():
            return no_result(f"ended with exit status {status}, see {log}", failed=True)
        return json.loads(file.read_text())


def _launcher(gpus: list[str], processes: int) -> list[str]:
    """Returns the module of a launcher, and the arguments that say how many ranks to start, and where."""
    if 0 < len(gpus) < processes:
        # DeepSpeed's launcher names a GPU for each rank, also where there is none.
        return ["torch.distributed.run", "--nproc_per_node", str(processes)]
    where = ["--include", "localhost:" + ",".join(gpus[:processes])] if gpus else ["--num_gpus", str(processes)]
    return ["deepspeed.launcher.runner", *where]


def _python_path(folder: Path, site: str | None) -> str:
    """Returns the PYTHONPATH of ranks: ``site``, then ``folder``, then this process's own without the checkout."""
    # Absolute, because the ranks run in another folder than this process.
    inherited = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    searched = [*([Path(site).resolve()] if site else []), folder]
    searched += [entry for entry in inherited if entry != CHECKOUT]
    return os.pathsep.join(map(str, searched))


def _free_port() -> int:
    # Below the ephemeral range, from which the kernel may give the port to any connection before a rank binds it.
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return probe.getsockname()[1]


def _held_locks(group: int) -> list[Path]:
    """Lists the files ``lock`` that processes of a group have open: torch's, while they compile native code."""
    locks = []
    for process in Path("/proc").glob("[0-9]*"):
        # A process may be another user's, or end meanwhile.
        with contextlib.suppress(OSError):
            opened = os.listdir(process / "fd") if os.getpgid(int(process.name)) == group else []
            for descriptor in opened:
                with contextlib.suppress(OSError):
                    locks.append((process / "fd" / descriptor).readlink())
    return [file for file in locks if file.name == "lock"]


def _end(process: subprocess.Popen, port: int) -> None:
    """Ends a run's remaining processes, and waits until they are gone and have freed their memory."""
    for _ in range(300):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        process.poll()
        time.sleep(0.1)
    process.wait()
    # DeepSpeed's all-reduce on CPU leaves 66 MiB of shared memory a rank, named after the port.
    for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        file.unlink(missing_ok=True)
