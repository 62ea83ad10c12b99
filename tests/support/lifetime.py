# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of gradient memory share: an engine, its steps, and how much memory is allocated.

Runs in the processes of ``support.pool``.
"""

import contextlib
import ctypes
import gc
import resource
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from support.training import Started, batch, build, make_engine

SETTLING = 0.3  # seconds


def start(case, module=None, **arguments):
    """Makes a module and its engine, of which nothing has been compiled yet. ``arguments`` as in ``make_engine``."""
    torch._dynamo.reset()
    module = module or build(case)
    return Started(module, make_engine(module, case, **arguments))


def backward(engine, step=0, micro_step=0):
    """Runs the forward and the backward of one micro-batch."""
    engine.backward(engine(batch(step, micro_step, dist.get_rank(), 4)))


def take_steps(engine, steps=1, first=0):
    """Takes steps of one micro-batch each. ``first``: the number of the first one."""
    for step in range(first, first + steps):
        backward(engine, step)
        engine.step()


def targets_at_calls(owner, method, engine, steps):
    """Trains ``steps`` steps. Returns how many targets exist at each call of a method in the last step."""
    called, counts, targets = getattr(owner, method), [], []

    def counted(*args):
        counts.append(sum(not target.expired() for target in targets))
        return called(*args)

    with mock.patch.object(owner, method, counted):
        for step in range(steps):
            backward(engine, step)
            views = engine.optimizer.averaged_gradients[0].without_padding()
            targets, views = [StorageWeakRef(view.untyped_storage()) for view in views], None
            counts.clear()
            engine.step()
    engine.destroy()
    return counts


@contextlib.contextmanager
def address_space_left(numbytes):
    """Lets this process allocate about so much more of its address space, which is all memory of the host."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + numbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def take_elsewhere(engine):
    """Gives the optimizer's states other memory, as moving them to another device does, and spoils what they had."""
    for state in engine.optimizer.optimizer.state.values():
        for name, value in state.items():
            if torch.is_tensor(value):
                state[name] = value.clone()
                value.untyped_storage().fill_(255)


class Raises(torch.autograd.Function):
    """Identity whose backward raises while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Raises.armed:
            raise ArithmeticError("half way through the backward")
        return gradient


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated_bytes(on_gpu):
    """Bytes in use: of the CUDA caching allocator, or of the C heap (which torch's CPU tensors come from)."""
    if on_gpu:
        return torch.cuda.memory_allocated()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def alive_soon(storages):
    """Returns how many of these ``StorageWeakRef`` are alive when threads that were about to let go have done so.

    A thread of gloo, or of a device, holds the tensors of its last task until it runs again.
    """
    until = time.monotonic() + 5
    while (alive := sum(not storage.expired() for storage in storages)) and time.monotonic() < until:
        time.sleep(0.01)
    return alive


def least_allocated_bytes(on_gpu):
    """Returns the least of :func:`allocated_bytes` within a while.

    A thread of gloo holds the tensors of a collective until it runs again: 10 ms were seen on a busy machine.
    """
    least, until = allocated_bytes(on_gpu), time.monotonic() + SETTLING
    while not on_gpu and time.monotonic() < until:
        time.sleep(0.005)
        least = min(least, allocated_bytes(on_gpu))
    return least
