# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Faults in a training step, and engines in which they happen. Runs in the processes of ``support.pool``."""

import _thread
import contextlib
import functools
import signal
import time
from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional
from unittest import mock

import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import gradient_counters, reset_gradient_counters

from support.engines import CaseBeside
from support.models import Model
from support.training import batch, device, held


class Injected(Exception):
    """What a fault raises."""


@dataclass
class Fault:
    """Something that happens once, in the middle of a forward or a backward, while it is armed."""

    happen: object = None

    def strike(self):
        happen, self.happen = self.happen, None
        if happen is not None:
            happen()


in_forward, in_backward = Fault(), Fault()


class _Strike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        in_forward.strike()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        in_backward.strike()
        return gradient


def strike(x):
    """Returns a copy of ``x``; faults that are armed strike here, in the forward and in the backward."""
    return _Strike.apply(x)


class Fragile(Model):
    """Faults strike between its block and its head, in the forward and in the backward."""

    def __init__(self):
        super().__init__(depth=1)

    def leave(self, x, ids):
        return super().leave(self.strike(x), ids)

    @torch.compiler.disable
    def strike(self, x):
        return strike(x)


def raise_injected():
    raise Injected("half way")


def allocate_too_much():
    # Refused by the allocator at once, whatever the machine.
    torch.empty(2**50, dtype=torch.uint8, device=device())


def interrupt():
    # As Ctrl-C does. Python's handler runs in the main thread: here if that runs the backward, else behind it.
    signal.raise_signal(signal.SIGINT)


def interrupt_behind_backward():
    """Interrupts the next ``loss.backward()`` on its return, where a device's thread has run the graph.

    Behind it comes what the engine does to end its backward.
    """
    backward = torch.Tensor.backward

    def interrupted(*args, **kwargs):
        torch.Tensor.backward = backward
        backward(*args, **kwargs)
        interrupt()

    torch.Tensor.backward = interrupted


def interrupt_at_end_of_graph():
    """Interrupts the running backward after its graph has ended and before the engine's epilogue begins.

    Python's handler runs with the main thread's next Python code. On a GPU that is where any interrupt during the
    backward ends up, since a device's thread runs the backward while the main thread waits.
    """
    come = functools.partial(_thread.interrupt_main, signal.SIGINT)
    torch.autograd.Variable._execution_engine.queue_callback(come)


HAPPENINGS = {"raises": raise_injected, "out of memory": allocate_too_much, "interrupted": interrupt}


def arm(where, how):
    """Makes a fault happen once: in the next "forward" or "backward".

    An interrupt may also come "at the end of the graph" of the next backward, or "behind the backward".
    """
    if where == "behind the backward":
        interrupt_behind_backward()
    elif where == "at the end of the graph":
        in_backward.happen = interrupt_at_end_of_graph
    else:
        (in_forward if where == "forward" else in_backward).happen = HAPPENINGS[how]


def train_step(engine, step, accumulation):
    for micro_step in range(accumulation):
        engine.backward(engine(batch(step, micro_step, dist.get_rank(), 4)))
        engine.step()


def fragile(case):
    """Returns a :class:`Fragile` with an engine, and a plain loop beside it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return CaseBeside(case, module=Fragile())


def held_soon(engine):
    """What is held once a device's thread has dropped the graph task, and with it what the backward left."""
    deadline = time.monotonic() + 5
    while torch.cuda.is_available() and any(held(gradient_counters(engine)).values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held(gradient_counters(engine))


class AfterFault(NamedTuple):
    """What came of a fault in a micro-batch."""

    raised: Optional[str]  # the type of the exception
    received: int  # gradients that graphs had given to the reducer by then
    held: Dict[str, int]  # behind the fault
    held_at_last: Dict[str, int]  # behind two later steps
    error: float  # of these


def on_every_rank(case, where, how, direct=False):
    """A fault on all ranks at the last micro-batch of a step.

    The plain loop of the two later steps has not seen the step that failed. ``direct``: whether the backward with the
    fault is ``loss.backward()``.
    """
    pair = fragile(case)
    engine = pair.engine
    pair.step(0)
    for micro_step in range(case.accumulation - 1):
        engine.backward(engine(batch(1, micro_step, dist.get_rank(), 4)))
        engine.step()
    raised = None
    arm(where, how)
    reset_gradient_counters(engine)
    try:
        loss = engine(batch(1, case.accumulation - 1, dist.get_rank(), 4))
        loss.backward() if direct else engine.backward(loss)
    except BaseException as error:
        raised = type(error).__name__
    received = gradient_counters(engine)["from_graphs"]
    if where == "forward" and case.accumulation > 1:
        # Nothing was lost: the step goes on with another micro-batch.
        engine.backward(engine(batch(1, case.accumulation - 1, dist.get_rank(), 4)))
        engine.step()
        pair.train_plain(1)
    after = held_soon(engine)
    error = 0.0
    for step in range(2, 4):
        pair.step(step)
        # A sum, which is NaN if one is.
        error += pair.error()
    at_last = held(gradient_counters(engine))
    engine.destroy()
    return AfterFault(raised, received, after, at_last, error)


class AfterHalf(NamedTuple):
    """What came of a step that was ended half way."""

    raised: List[str]  # by that step and by another
    error: float  # after a checkpoint was loaded


def half_a_step(case, folder):
    """A step raises while it changes parameters, and another is tried. Then a checkpoint is loaded."""
    pair = fragile(case)
    engine = pair.engine
    pair.step(0)
    engine.save_checkpoint(folder)
    # Not in the optimizer, because an optimizer whose step() was replaced is not stepped in chunks.
    placement = engine.optimizer._deepcompile.placement
    fails, raised = mock.patch.object(placement, "send", side_effect=Injected("behind the update")), []
    for context in (fails, contextlib.nullcontext()):
        try:
            with context:
                train_step(engine, 1, case.accumulation)
        except (RuntimeError, Injected) as error:
            raised.append(str(error))
    engine.load_checkpoint(folder)
    pair.step(1)
    return AfterHalf(raised, pair.last_error())
