# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Processes that run test functions as the ranks of one process group.

Importing torch and DeepSpeed takes seconds, so the processes stay: each test sends them a function to run. On CPU they
are forked from one process that has imported both and does nothing else.
"""

import contextlib
import datetime
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
import traceback
from pathlib import Path
from unittest import mock

from support import shared_gpus

TESTS = Path(__file__).resolve().parent.parent
# What every rank imports, in this order.
IMPORTED = ["support.graph_cache", "torch._inductor.compile_fx", "deepspeed", "deepspeed.compile.init_z1_and_2"]
# What the process imports from which ranks are forked, if torch is built for CPUs only. Not in ranks that are started
# otherwise: each would compile.
PRELOADED = [*IMPORTED, "support.warm"]


# Seconds until a rank must have started, which includes compiling the native code.
TIME_TO_START = 600
# CPU-seconds of this process's ranks in the functions that tests had them call.
SPENT = {"calls": 0.0}


def cpu_seconds():
    """Returns the CPU-seconds of this process, with those of the programs that it has waited for."""
    return sum(os.times()[:4])


def free_port():
    """Returns a free port below the ephemeral range, so the kernel cannot give it away before the ranks bind it.

    Each worker of pytest-xdist has ports of its own, because seconds pass until the ranks bind.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = 12000 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = 20000 + worker * share
    while True:
        # Not from the seed that hypothesis sets, which is the same everywhere.
        port = random.SystemRandom().randrange(first, first + share)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def remove_buffers(port):
    """Removes the shared memory that DeepSpeed's all-reduce on CPU leaves behind, 66 MiB a rank, of ranks on ``port``.

    What processes have mapped stays theirs.
    """
    for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        file.unlink(missing_ok=True)


class RankFailed(AssertionError):
    """A function raised on at least one rank; the message holds each traceback."""


class Ranks:
    """``world`` processes with a gloo (on GPUs: NCCL) process group between them.

    Where there are GPUs but fewer than ``world``, processes share them.

    Args:
        world: number of processes.
        environment: variables set in the processes besides this one's own.
        patience: seconds after which a collective gives up.
    """

    def __init__(self, world, environment=None, patience=1800):
        self.world = world
        self._environment = dict(environment or {})
        self._patience = patience
        self._processes, self._connections = [], []

    @property
    def started(self):
        return bool(self._processes)

    def start(self):
        import torch

        port, gpus = free_port(), torch.cuda.device_count()
        with self._context() as context:
            for rank in range(self.world):
                connection, of_rank = context.Pipe()
                settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
                settings.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                settings.update(shared_gpus.variables(rank, self.world, gpus))
                process = context.Process(target=_serve, args=(of_rank, settings, self._patience), daemon=True)
                process.start()
                of_rank.close()
                self._processes.append(process)
                self._connections.append(connection)
        try:
            for rank, connection in enumerate(self._connections):
                if not connection.poll(TIME_TO_START):
                    raise RankFailed(
                        f"rank {rank} did not start within {TIME_TO_START} s; it may wait for native code that "
                        "another process builds"
                    )
                connection.recv()
        except BaseException:
            self.stop()
            raise

    @contextlib.contextmanager
    def _context(self):
        """Yields the ``multiprocessing`` context that starts the processes.

        A process that is forked has torch's reading of the variables of the process from which it is forked, and on
        GPUs it might have that process's unusable state of CUDA.
        """
        import torch

        forks = not self._environment and not torch.cuda.is_available()
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        folder = os.getcwd()
        with mock.patch.dict(os.environ, self._environment):
            if forks:
                # A torch that is built for GPUs starts autograd's threads when it first compiles, also without a GPU,
                # and lets no process that is forked after that run a backward.
                context.set_forkserver_preload(IMPORTED if torch.backends.cuda.is_built() else PRELOADED)
                # The process from which others are forked looks for modules in the current folder first. In the
                # checkout's own folder that would be deepspeed/, which is a part of the package.
                os.chdir(TESTS)
                try:
                    multiprocessing.forkserver.ensure_running()
                finally:
                    os.chdir(folder)
            yield context

    def stop(self):
        # Forgotten first: a test that runs out of time here leaves nothing to which another test would send.
        processes, self._processes = self._processes, []
        connections, self._connections = self._connections, []
        # All of them, and only then waited for: on a GPU that many processes share, one takes long to end.
        for process in processes:
            process.kill()
        for process, connection in zip(processes, connections, strict=True):
            _join(process)
            connection.close()

    def run(self, function, *args, timeout=600, **kwargs):
        """Calls ``function(*args, **kwargs)`` on every rank; returns the results in rank order.

        ``function`` is importable under ``tests/``, or what ``on_ranks`` has made of a test. When it begins, torch has
        compiled nothing and has the seed 0. A rank that raises, dies or takes longer than ``timeout`` seconds fails
        the call and ends the processes; the next call starts new ones.
        """
        try:
            # When one rank failed, the others may wait for it.
            answers = self._ask(function, args, kwargs, timeout, timeout_after_failure=5)
        except BaseException:
            # Of a test that ran out of time, the next one would get the answer.
            self.stop()
            raise
        failures = [f"rank {rank} {answer}" for rank, (succeeded, answer) in enumerate(answers) if not succeeded]
        if failures:
            self.stop()
            raise RankFailed("\n".join(failures))
        return [answer for _, answer in answers]

    def run_to_the_end(self, function, *args, timeout, **kwargs):
        """Does the same where ranks are expected to fail: of one that did, a text says how. Ends the processes."""
        try:
            return [answer for _, answer in self._ask(function, args, kwargs, timeout, timeout)]
        finally:
            self.stop()

    def _ask(self, function, args, kwargs, timeout, timeout_after_failure):
        """Lists (whether it succeeded, its result or how it failed) for each rank.

        Args:
            timeout, timeout_after_failure: seconds in which the next rank must answer, before one failed and after.
        """
        if not self._processes:
            self.start()
        for connection in self._connections:
            connection.send((function.__module__, function.__qualname__, args, kwargs))
        answers, awaited = {}, dict(zip(self._connections, range(self.world)))
        while awaited:
            # In any order: a rank that failed answers while the others wait for it.
            answered = multiprocessing.connection.wait(awaited, timeout)
            if not answered:
                answers.update({rank: (False, f"gave no answer within {timeout} s") for rank in awaited.values()})
                break
            for connection in answered:
                rank = awaited.pop(connection)
                answers[rank] = self._answer_of(rank, connection)
                if not answers[rank][0]:
                    timeout = timeout_after_failure
        return [answers[rank] for rank in range(self.world)]

    def _answer_of(self, rank, connection):
        try:
            succeeded, result, seconds = connection.recv()
        except (EOFError, ConnectionError):
            _join(self._processes[rank])
            return False, f"died with exit status {self._processes[rank].exitcode}"
        SPENT["calls"] += seconds
        return succeeded, result if succeeded else f"raised:\n{result}"


def _join(process):
    """Waits for a rank to end. What a spawned rank has spent becomes this process's, and ``SPENT`` has it already."""
    before = cpu_seconds()
    process.join()
    SPENT["calls"] -= cpu_seconds() - before


def _serve(connection, settings, patience):
    """Runs in each process: a rank with these variables of a launcher."""
    os.environ.update({name: str(value) for name, value in settings.items()})
    # A process that was started anew looks where its parent does, not first where its own variable says.
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # What was preloaded is for this process, not for compilers that it starts.
    os.environ.pop("LD_PRELOAD", None)
    for name in IMPORTED:
        importlib.import_module(name)

    import torch
    from torch._dynamo import guards

    import deepspeed

    from support import graph_cache, on_ranks

    graph_cache.install()
    on_ranks.explain_assertions()
    # Modules stay, so that looking for garbage after each test does not have to look through them.
    gc.freeze()
    modules = len(sys.modules)
    # The parent process may have set SIGINT to be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deepspeed.init_distributed(dist_backend=backend, timeout=datetime.timedelta(seconds=patience))
    # NCCL makes its communicator in the first collective, for which no test shall run out of time either.
    torch.distributed.barrier()
    if backend == "gloo":
        # When all ranks have mapped it, none needs its name any more. Most of these processes are killed in the end.
        remove_buffers(os.environ["MASTER_PORT"])
    # Dynamo times the guards of each graph with empty caches, for a log that no test reads. Emptying them takes 18 ms.
    guards.profile_guard_manager = lambda *_: 0.0
    linear = torch.nn.functional.linear
    # Only now, because DeepSpeed may have compiled native code, for which no test shall run out of time.
    connection.send("ready")
    while True:
        try:
            module, name, args, kwargs = connection.recv()
        except EOFError:
            return
        # Each function begins alike, whatever ran before it.
        torch._dynamo.reset()
        torch.manual_seed(0)
        before = cpu_seconds()
        try:
            function = getattr(importlib.import_module(module), name)
            function = getattr(function, "in_rank", function)
            # What this process has imported and still has to collect depends on which tests it ran before.
            before = cpu_seconds()
            answer = (True, function(*args, **kwargs))
        except BaseException:  # noqa: B902 (told to the test, whatever it is)
            answer = (False, traceback.format_exc())
        spent = cpu_seconds() - before
        # An engine that is collected later, while another test traces a graph, is destroyed a second time there, and
        # the base then asks real tensors whether they are pinned under the tracer's fake ones: it takes minutes.
        gc.collect()
        if len(sys.modules) > modules + 20:
            # The first test that generates code, or that trains a model of transformers, imports a hundred more.
            gc.freeze()
            modules = len(sys.modules)
        # ZeRO-3 replaces it for the life of a process, and torch 2.11 compiles the replacement wrongly.
        torch.nn.functional.linear = linear
        # DeepSpeed keeps an engine's mpu for engines that are given none, and these would count its ranks of a model.
        deepspeed.utils.groups.mpu = None
        connection.send((*answer, spent))
