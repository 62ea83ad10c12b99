# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Runs train.py in processes of its own, under the launcher of a given DeepSpeed."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parent / "train.py"


def devices():
    """Returns the GPUs to use as the launcher numbers them; none: a CPU."""
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(torch.cuda.device_count())]
    named = visible.split(",")
    if not all(name.isdecimal() for name in named):
        raise SystemExit(f"CUDA_VISIBLE_DEVICES={visible}: DeepSpeed's launcher needs numbers; name GPUs by these.")
    return named


def end_on_signals():
    """Has SIGTERM and SIGHUP raise SystemExit here, so that what :func:`run` started is ended too."""

    def end(number, _frame):
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def none(why, failed=False):
    """What stands for a result that there is not: why, and whether that is a failure."""
    return {"why": why, "failed": failed}


def run(arguments, gpus, processes, site, caches, extensions, limit, log):
    """Returns a run's result, or :func:`none`.

    Args:
        arguments: of train.py.
        gpus: what :func:`devices` returned.
        processes: how many to start.
        site: a folder for the front of PYTHONPATH, or None.
        caches: a folder for what torch compiles.
        extensions: a folder for native code. Each DeepSpeed needs its own.
        limit: seconds after which the run is ended.
        log: a file for what it prints.
    """
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCH_EXTENSIONS_DIR": str(extensions),
    }
    if site:
        paths = [str(Path(site).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    where = ["--include", "localhost:" + ",".join(gpus[:processes])] if gpus else ["--num_gpus", str(processes)]
    if not gpus:
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder, open(log, "w") as output:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "deepspeed.launcher.runner", *where, "--master_port", str(_free_port())]
        # A session of its own, so that its end reaches all of its processes.
        process = subprocess.Popen(
            [*command, str(TRAIN), *arguments, "--json", str(file)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except BaseException as error:
            _end(process)
            # A process that was ended while it compiled leaves its lock, for which the next would wait forever.
            for lock in extensions.glob("**/lock"):
                lock.unlink()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return none(f"not done after {limit:.0f} s, see {log}", failed=True)
        _end(process)
        if status or not file.exists():
            return none(f"ended with exit status {status}, see {log}", failed=True)
        return json.loads(file.read_text())


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end(process):
    """Ends what is left of a run, and waits until it has given back its memory."""
    for _ in range(300):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        process.poll()
        time.sleep(0.1)
    process.wait()
