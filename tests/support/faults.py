# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Faults in a training step, and what the ranks do in ``test_faults.py``."""

import _thread
import contextlib
import copy
import functools
import os
import resource
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepspeed.compile.zero12 import gradient_counters

from support.models import Model
from support.training import average_gradients, batch, device, held, make_engine, make_optimizer, relative_error


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
    """Faults strike behind its second block, in the forward and in the backward."""

    def __init__(self):
        super().__init__(depth=3)
        for index, block in enumerate(self.blocks):
            block.is_second = index == 1

    def run_block(self, block, x):
        x = block(x)
        return self.strike(x) if block.is_second else x

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
    """Has the next ``loss.backward()`` interrupted on its return, where a device's thread has run the graph.

    Behind it comes what the engine does to end its backward.
    """
    backward = torch.Tensor.backward

    def interrupted(*args, **kwargs):
        torch.Tensor.backward = backward
        backward(*args, **kwargs)
        interrupt()

    torch.Tensor.backward = interrupted


def interrupt_at_end_of_graph():
    """Has an interrupt come when the graph of the running backward has ended, and the engine's epilogue has not begun.

    Python's handler runs with the main thread's next Python code. On a GPU that is where any interrupt during the
    backward ends up, since a device's thread runs the backward while the main thread waits.
    """
    come = functools.partial(_thread.interrupt_main, signal.SIGINT)
    torch.autograd.Variable._execution_engine.queue_callback(come)


HAPPENINGS = {"raises": raise_injected, "out of memory": allocate_too_much, "interrupted": interrupt}


def _arm(where, how):
    """Has a fault happen once: in the next "forward" or "backward".

    An interrupt may also come "at the end of the graph" of the next backward, or "behind the backward".
    """
    if where == "behind the backward":
        interrupt_behind_backward()
    elif where == "at the end of the graph":
        in_backward.happen = interrupt_at_end_of_graph
    else:
        (in_forward if where == "forward" else in_backward).happen = HAPPENINGS[how]


def _step(engine, step, accumulation):
    for micro_step in range(accumulation):
        engine.backward(engine(batch(step, micro_step, dist.get_rank(), 4)))
        engine.step()


def _plain_step(plain, optimizer, step, accumulation):
    for micro_step in range(accumulation):
        (plain(batch(step, micro_step, dist.get_rank(), 4)) / accumulation).backward()
    average_gradients(plain)
    optimizer.step()
    optimizer.zero_grad()


def _fragile(case):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Fragile().to(device())
    plain = copy.deepcopy(module)
    return module, make_engine(module, case), plain, make_optimizer(plain, case)


def on_every_rank(case, where, how):
    """A fault on all ranks at the last micro-batch of a step.

    Returns its exception, the bytes held behind it and behind two later steps, and the error of these beside a plain
    loop that has not seen the step that failed.
    """
    module, engine, plain, optimizer = _fragile(case)
    _step(engine, 0, case.accumulation)
    _plain_step(plain, optimizer, 0, case.accumulation)
    for micro_step in range(case.accumulation - 1):
        engine.backward(engine(batch(1, micro_step, dist.get_rank(), 4)))
        engine.step()
    raised = None
    _arm(where, how)
    try:
        engine.backward(engine(batch(1, case.accumulation - 1, dist.get_rank(), 4)))
    except BaseException as error:
        raised = type(error).__name__
    if where == "forward" and case.accumulation > 1:
        # Nothing was lost: the step goes on with another micro-batch.
        engine.backward(engine(batch(1, case.accumulation - 1, dist.get_rank(), 4)))
        engine.step()
        _plain_step(plain, optimizer, 1, case.accumulation)
    after = _held_soon(engine)
    error = 0.0
    for step in range(2, 4):
        _step(engine, step, case.accumulation)
        _plain_step(plain, optimizer, step, case.accumulation)
        error = max(error, relative_error(module.parameters(), plain.parameters()))
    at_last = held(gradient_counters(engine))
    engine.destroy()
    return raised, after, at_last, error


def part_of_a_step_lost(case, how):
    """The second of three micro-batches raises where the caller says what belongs to a step.

    Returns what the step then raises, and the error of a whole step behind it. Where DeepSpeed counts micro-batches
    ("counted"), engine.step() is called behind the one that raised as behind the others.
    """
    module, engine, plain, optimizer = _fragile(case)
    _step(engine, 0, 3)
    _plain_step(plain, optimizer, 0, 3)

    steps_each = how in ("boundary", "counted", "no_sync, counted")

    def micro_batch(step, micro_step, fails):
        last = micro_step == 2
        if how == "boundary":
            engine.set_gradient_accumulation_boundary(last)
        if fails and micro_step == 1:
            in_backward.happen = raise_injected
        loss = engine(batch(step, micro_step, dist.get_rank(), 4))
        with engine.no_sync() if "no_sync" in how and not last else contextlib.nullcontext():
            with contextlib.suppress(Injected):
                engine.backward(loss)
        if steps_each:
            engine.step()

    def run(step, fails):
        in_a_block = how == "coalesce_grad_reduction"
        with engine.coalesce_grad_reduction() if in_a_block else contextlib.nullcontext():
            for micro_step in range(3):
                micro_batch(step, micro_step, fails)
        if not steps_each:
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
            engine.set_gradient_accumulation_boundary(False)

    raised = None
    if how == "no_sync":
        engine.set_gradient_accumulation_boundary(True)
    try:
        run(1, fails=True)
    except RuntimeError as error:
        raised = str(error)
    if how == "counted":
        # The one that raised and those before it do not count, so the step still lacks two.
        for micro_step in range(2):
            engine.backward(engine(batch(1, micro_step, dist.get_rank(), 4)))
            engine.step()
        for micro_step in (2, 0, 1):
            (plain(batch(1, micro_step, dist.get_rank(), 4)) / 3).backward()
        average_gradients(plain)
        optimizer.step()
        optimizer.zero_grad()
    else:
        if how == "no_sync":
            engine.set_gradient_accumulation_boundary(True)
        run(2, fails=False)
        _plain_step(plain, optimizer, 2, 3)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return raised, error


def _held_soon(engine):
    """What is held once a device's thread has dropped the graph task, and with it what the backward left."""
    deadline = time.monotonic() + 5
    while torch.cuda.is_available() and any(held(gradient_counters(engine)).values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held(gradient_counters(engine))


# Memory that runs out ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_left(numbytes):
    """Lets this process allocate about so much more: of its address space or, on a GPU, of the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + numbytes) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + numbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Large(torch.nn.Module):
    """Matrices of 36 MiB: beyond 32, the C library gives memory back to the system as soon as it is free."""

    NUMEL = 9 * 2**20

    def __init__(self):
        super().__init__()
        self.matrices = torch.nn.ParameterList(torch.full((64, self.NUMEL // 64), 5e-5) for _ in range(4))

    def forward(self, ids):
        x = ids[:, :1] + torch.ones(1, 64, device=ids.device)
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix @ matrix.t())
        return (x - 1).square().mean()


def memory_that_runs_out(case, amounts):
    """Backwards with little memory left, more each time, and after each that raised a step with enough of it.

    Returns what each of the former raised, bytes held then, the error against a plain loop of the steps that were
    taken, how far these went, and what ended them, if something did: ranks that ran out of memory in different places
    have sent different gradients.
    """
    torch._dynamo.reset()
    module = Large().to(device())
    plain, before = copy.deepcopy(module), copy.deepcopy(module)
    engine, optimizer = make_engine(module, case), make_optimizer(plain, case)
    raised, afterwards, ended = [], [], None
    _step(engine, 0, 1)
    _plain_step(plain, optimizer, 0, 1)
    for step, amount in enumerate(amounts, 1):
        loss = engine(batch(99, 0, dist.get_rank(), 4))
        try:
            with memory_left(amount):
                engine.backward(loss)
            raised.append(None)
            engine.optimizer.zero_grad()
        except (RuntimeError, MemoryError) as error:
            raised.append(str(error))
        del loss
        afterwards.append(_held_soon(engine))
        try:
            _step(engine, step, 1)
        except RuntimeError as error:
            ended = str(error)
            break
        _plain_step(plain, optimizer, step, 1)
    error = relative_error(module.parameters(), plain.parameters())
    moved = relative_error(module.parameters(), before.parameters())
    engine.destroy()
    return raised, afterwards, error, moved, ended


# Faults on one rank -----------------------------------------------------------------------------------------------


class Branches(torch.nn.Module):
    """Each call runs the blocks that it is told to; all of them lie in the first of two partitions."""

    def __init__(self, alike):
        super().__init__()
        widths = [6, 6] if alike else [6, 9]
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 6)) for width in widths
        )
        self.embedding = torch.nn.Embedding(100, 6)

    def forward(self, ids, chosen):
        x = self.embedding(ids)
        for index in chosen:
            x = self.blocks[index](x)
        return x.square().mean()


def another_branch(case, alike, chosen):
    """Ranks run different blocks in step 1 and the same in step 2: what each step raised, and whether it changed
    parameters.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Branches(alike).to(device())
    engine = make_engine(module, case)
    seen = []
    for step, blocks in enumerate([(0, 1), chosen[dist.get_rank()], (0, 1)]):
        before = [parameter.detach().clone() for parameter in module.parameters()]
        raised = None
        try:
            engine.backward(engine(batch(step, 0, dist.get_rank(), 4), blocks))
            engine.step()
        except RuntimeError as error:
            raised = str(error)
        moved = any(not torch.equal(old, new) for old, new in zip(before, module.parameters()))
        seen.append((raised, moved))
    engine.destroy()
    return seen


def on_one_rank(case, how, rank, steps=3):
    """A fault in the backward of ``rank``, which goes on if it can: (what was raised in each step, seconds)."""
    _, engine, _, _ = _fragile(case)
    # Longer than the others wait.
    patience = engine.data_parallel_group._get_backend(device()).options._timeout.total_seconds()
    happenings = {
        "raises": raise_injected,
        "dies": lambda: os._exit(17),
        "hangs": lambda: time.sleep(patience + 2),
    }
    _step(engine, 0, case.accumulation)
    begun, raised = time.monotonic(), []
    for step in range(1, 1 + steps):
        if step == 1 and dist.get_rank() == rank:
            in_backward.happen = happenings[how]
        try:
            _step(engine, step, case.accumulation)
            raised.append(None)
        except (RuntimeError, Injected) as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised, time.monotonic() - begun


def dies_in_the_optimizer(case, rank):
    """``rank`` dies while it is stepped: what the others raise from the step and from what they try afterwards."""
    _, engine, _, _ = _fragile(case)
    _step(engine, 0, 1)
    if dist.get_rank() == rank:
        engine.optimizer.optimizer.step = lambda: os._exit(17)
    raised = {}
    engine.backward(engine(batch(1, 0, dist.get_rank(), 4)))
    attempts = {
        "step": engine.step,
        "forward": lambda: engine(batch(2, 0, dist.get_rank(), 4)),
        "save": lambda: engine.optimizer.state_dict(),
        "destroy": engine.destroy,
    }
    for name, attempt in attempts.items():
        begun = time.monotonic()
        try:
            attempt()
            raised[name] = None
        except RuntimeError as error:
            raised[name] = str(error)
        raised[name + " took"] = time.monotonic() - begun
    return raised


def a_block_that_was_left(case, where):
    """The second of three micro-batches raises out of ``coalesce_grad_reduction()``, and all are run again.

    Returns what was raised, and the error behind that step and another.
    """
    module, engine, plain, optimizer = _fragile(case)

    def block(step, fails):
        with engine.coalesce_grad_reduction():
            for micro_step in range(3):
                if fails and micro_step == 1:
                    _arm(where, "interrupted" if where == "behind the backward" else "raises")
                engine.backward(engine(batch(step, micro_step, dist.get_rank(), 4)))

    raised = None
    for step in range(2):
        if step == 0:
            try:
                block(step, fails=True)
            except (Injected, KeyboardInterrupt) as error:
                raised = type(error).__name__
        block(step, fails=False)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        _plain_step(plain, optimizer, step, 3)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return raised, error


def a_step_that_changed_nothing(case):
    """A step raises before it changes parameters; returns what, what is held then, and the error when it is redone."""
    module, engine, plain, optimizer = _fragile(case)
    own_norm = engine.optimizer.scaled_global_norm

    def norm_that_raises():
        engine.optimizer.scaled_global_norm = own_norm
        raise Injected("no norm")

    engine.optimizer.scaled_global_norm = norm_that_raises
    raised = None
    try:
        _step(engine, 0, case.accumulation)
    except Injected as error:
        raised = str(error)
    after = held(gradient_counters(engine))
    for step in range(2):
        _step(engine, step, case.accumulation)
        _plain_step(plain, optimizer, step, case.accumulation)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return raised, after, error


def half_a_step(case, folder):
    """A step raises while it changes parameters: what is raised then, and the error after a checkpoint was loaded."""
    module, engine, plain, optimizer = _fragile(case)
    _step(engine, 0, case.accumulation)
    _plain_step(plain, optimizer, 0, case.accumulation)
    engine.save_checkpoint(folder)
    inner, raised = engine.optimizer.optimizer, []
    own_step = inner.step

    def step_and_raise():
        own_step()
        raise Injected("behind the update")

    for attempt in range(2):
        inner.step = step_and_raise if attempt == 0 else own_step
        try:
            _step(engine, 1, case.accumulation)
        except (RuntimeError, Injected) as error:
            raised.append(str(error))
    engine.load_checkpoint(folder)
    _step(engine, 1, case.accumulation)
    _plain_step(plain, optimizer, 1, case.accumulation)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return raised, error
