# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Backwards that raise, that come several before a step, that are not reduced yet, and that are watched."""

import contextlib
import copy
import threading
import time
import warnings
import weakref
from typing import Dict, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero12 import gradient_counters, reset_gradient_counters
from deepspeed.compile.zero12.backward import BackwardLife
from deepspeed.compile.zero12.update.groups import StepOfGroups
from deepspeed.utils import safe_get_full_grad

from support.ids import vary
from support.lifetime import Raises, backward, start, step_beside
from support.models import Model
from support.training import (
    BOUND,
    NOTHING,
    Case,
    average_gradients,
    batch,
    build,
    device,
    held,
    make_optimizer,
    relative_error,
    step_plain,
    train_plain,
)


class AfterRaising(NamedTuple):
    """What came of a backward that raised."""

    raised: bool
    received: int  # gradients that graphs had given to the reducer by then
    held: Dict[str, int]
    error: float  # of the steps that followed


def backward_that_raises(case, direct):
    """A backward raises after some gradients were reduced, and two steps follow."""

    class Fragile(Model):
        def run_block(self, block, x):
            return self.maybe_raise(block(x))

        @torch.compiler.disable
        def maybe_raise(self, x):
            return Raises.apply(x)

    torch.manual_seed(0)
    module = Fragile().to(device())
    plain = copy.deepcopy(module)
    _, engine = start(case, module)
    rank = dist.get_rank()

    def run_backward(step, micro_step=0):
        loss = engine(batch(step, micro_step, rank, 4))
        if direct:
            loss.backward()
        else:
            engine.backward(loss)

    Raises.armed = False
    for micro_step in range(case.accumulation - 1):
        run_backward(9, micro_step)
        engine.step()
    Raises.armed = True
    reset_gradient_counters(engine)
    raised = False
    try:
        run_backward(9, case.accumulation - 1)
    except ArithmeticError:
        raised = True
    received = gradient_counters(engine)["from_graphs"]
    # A device's thread drops the graph task, and with it what the backward left, a moment after the exception.
    deadline = time.monotonic() + 5
    while torch.cuda.is_available() and any(held(gradient_counters(engine)).values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    after = held(gradient_counters(engine))
    Raises.armed = False
    # The micro-batches before the one that raised were dropped with it: the next is the first of a step.
    optimizer = make_optimizer(plain, case)
    for step in range(2):
        for micro_step in range(case.accumulation):
            run_backward(step, micro_step)
            engine.step()
            (plain(batch(step, micro_step, rank, 4)) / case.accumulation).backward()
        step_plain(plain, optimizer)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return AfterRaising(raised, received, after, error)


@pytest.mark.quick
@pytest.mark.sanitized
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 2)])
def test_a_backward_that_raises_leaves_nothing(ranks, stage, accumulation, direct):
    case = Case(stage=stage, accumulation=accumulation, bucket=50)
    for after in ranks(2).run(backward_that_raises, case, direct):
        assert after.raised and after.received > 0
        assert after.held == NOTHING
        assert after.error < BOUND


def full_gradients(case):
    """Error of safe_get_full_grad() between backward and step against a plain loop's averaged gradients."""
    module, engine = start(case)
    plain = build(case)
    backward(engine)
    plain(batch(0, 0, dist.get_rank(), 4)).backward()
    average_gradients(plain)
    found = [safe_get_full_grad(parameter) for parameter in module.parameters()]
    error = relative_error(found, [parameter.grad for parameter in plain.parameters()])
    engine.step()
    engine.destroy()
    return error


@pytest.mark.sanitized
@pytest.mark.parametrize("model", ["OneGraph", "OddSizes", "TiedEmbedding"])
@vary("stage", [1, 2])
def test_full_gradients_between_backward_and_step(ranks, stage, model):
    assert max(ranks(2).run(full_gradients, Case(stage=stage, model=model))) < BOUND


def swap_parameters(case):
    """Gives parameters other memory between steps, as code that averages weights does; the error of the training."""
    module, engine = start(case)
    plain = build(case)
    optimizer = make_optimizer(plain, case)
    for step in range(3):
        step_beside(engine, plain, optimizer, step)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    step_beside(engine, plain, optimizer, 3)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error


@pytest.mark.sanitized
@vary("stage", [1, 2])
def test_parameters_that_were_given_other_memory(ranks, stage):
    for error in ranks(2).run(swap_parameters, Case(stage=stage)):
        assert error < BOUND


def synchronizations(case):
    """What torch says where the host waits for the device from a backward's beginning to the optimizer's step.

    Torch does not tell of the wait for an event, with which ranks agree in ``Reducer::agree_and_reduce_late()``.
    """
    _, engine = start(case)
    run, waited = StepOfGroups.run, []

    def stepped(*args):
        torch.cuda.set_sync_debug_mode("default")
        return run(*args)

    for step in range(case.steps):
        for micro_step in range(case.accumulation):
            loss = engine(batch(step, micro_step, dist.get_rank(), 4))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                # Compiling, in the first steps, waits.
                torch.cuda.set_sync_debug_mode("warn" if step > 1 else "default")
                engine.backward(loss)
                # Not in the optimizer, because an optimizer whose step() was replaced is not stepped in ranges.
                with mock.patch.object(StepOfGroups, "run", stepped):
                    engine.step()
                torch.cuda.set_sync_debug_mode("default")
            told = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
            waited += [f"{warning.filename}:{warning.lineno}" for warning in told]
    engine.destroy()
    return waited


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there the host can run ahead")
@vary("regional", [False, True])
@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "check_grad_overflow"])
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 2)])
def test_the_host_waits_before_the_optimizer_only_to_agree(ranks, asked, regional, stage, accumulation):
    config = {"bf16": {"check_grad_overflow": asked}, "compile": {"regional_compilation": regional}}
    case = Case(
        stage=stage, accumulation=accumulation, backend="inductor", dtype="bf16", clipping=0.1, config=config, steps=4
    )
    for waited in ranks(2).run(synchronizations, case):
        assert bool(waited) == asked, waited


def without_synchronization(case):
    """no_sync() and coalesce_grad_reduction(): errors against a plain loop over the same batches."""
    errors = []
    for context in ("no_sync", "coalesce_grad_reduction"):
        if context == "no_sync" and case.stage == 2:
            continue  # the engine refuses it
        module, engine = start(case)
        plain = build(case)
        optimizer = make_optimizer(plain, case)
        rank = dist.get_rank()
        with getattr(engine, context)():
            for micro_step in range(2):
                backward(engine, 0, micro_step)
                kept = held(gradient_counters(engine))
                assert kept["bound"] == 0 and kept["unreduced"] > 0, kept
        if context == "no_sync":
            backward(engine, 0, 2)
        engine.step()
        for micro_step in range(3 if context == "no_sync" else 2):
            plain(batch(0, micro_step, rank, 4)).backward()
        average_gradients(plain)
        optimizer.step()
        errors.append(relative_error(module.parameters(), plain.parameters()))
        engine.destroy()
    return errors


@pytest.mark.sanitized
@vary("stage", [1, 2])
def test_gradients_kept_by_no_sync_and_coalescing(ranks, stage):
    for errors in ranks(2).run(without_synchronization, Case(stage=stage)):
        assert max(errors) < BOUND


class SeveralBackwards(NamedTuple):
    """The error of a step of several backwards, and what was held after it."""

    error: float
    held: Dict[str, int]


def several_backwards(case):
    """Two losses with a backward each, then one backward of two forwards, before one step; all forwards come first."""
    module, engine = start(case)
    plain = build(case)
    optimizer = make_optimizer(plain, case)
    rank = dist.get_rank()
    losses = [engine(batch(0, number, rank, 4)) for number in range(4)]
    for number in range(2):
        engine.backward(losses[number])
        plain(batch(0, number, rank, 4)).backward()
    engine.backward(losses[2] + losses[3])
    (plain(batch(0, 2, rank, 4)) + plain(batch(0, 3, rank, 4))).backward()
    engine.step()
    average_gradients(plain)
    optimizer.step()
    error = relative_error(module.parameters(), plain.parameters())
    after = held(gradient_counters(engine))
    engine.destroy()
    return SeveralBackwards(error, after)


@pytest.mark.sanitized
@vary("stage", [1, 2])
def test_several_backwards_before_a_step(ranks, stage):
    for several in ranks(2).run(several_backwards, Case(stage=stage)):
        assert several.error < BOUND
        assert several.held == NOTHING


class Polled(NamedTuple):
    """How often the counters were read while an engine trained, and its error."""

    reads: int
    error: float


def polled_counters(case):
    """Trains while another thread reads the counters without pause."""
    module, engine = start(case)
    plain = build(case)
    optimizer = make_optimizer(plain, case)
    reads, done = [0], threading.Event()

    def poll():
        while not done.is_set():
            gradient_counters(engine)
            reset_gradient_counters(engine)
            reads[0] += 1

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        for step in range(10):
            # The caller drops gradients that lie in `parameter.grad`, which the other thread is reading.
            with engine.no_sync():
                backward(engine, step)
            for parameter in module.parameters():
                parameter.grad = None
            engine.zero_grad()
            step_beside(engine, plain, optimizer, step)
    finally:
        done.set()
        poller.join()
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return Polled(reads[0], error)


@pytest.mark.sanitized
def test_counters_may_be_read_from_another_thread(ranks):
    for polled in ranks(2).run(polled_counters, Case(bucket=50)):
        assert polled.reads > 10
        assert polled.error < BOUND


def counters_of_a_rank_that_waits(case):
    """Rank 1 begins its backward late. Returns how long reading the counters took at most until that moment."""
    module, engine = start(case)
    backward(engine)
    engine.step()
    longest, done = [0.0], threading.Event()

    def poll():
        while not done.is_set():
            began = time.monotonic()
            gradient_counters(engine)
            reset_gradient_counters(engine)
            longest[0] = max(longest[0], time.monotonic() - began)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        time.sleep(2 * dist.get_rank())
        backward(engine, 1)
    finally:
        done.set()
        poller.join()
    engine.step()
    engine.destroy()
    return longest[0]


@pytest.mark.sanitized
def test_counters_do_not_wait_for_other_ranks(ranks):
    assert max(ranks(2).run(counters_of_a_rank_that_waits, Case(bucket=50))) < 1


def begin_while_another_is_dropped(case, held_in):
    """A backward raises in another thread, which then stays long in a method of BackwardLife. Meanwhile this thread
    takes a step.

    ``held_in``: "settle" holds the thread before it has seen that the backward was abandoned, and
    "_release_handed_over" before it drops the step's gradients. In the latter, this thread has to wait.
    """

    class Fragile(Model):
        @torch.compiler.disable
        def run_block(self, block, x):
            return Raises.apply(block(x))

    torch.manual_seed(0)
    module = Fragile().to(device())
    plain = copy.deepcopy(module)
    _, engine = start(case, module)
    optimizer = make_optimizer(plain, case)
    Raises.armed = Raises.has_raised = False
    step_beside(engine, plain, optimizer, 0)
    told, may_go_on, method = threading.Event(), threading.Event(), getattr(BackwardLife, held_in)

    def late(life):
        if threading.current_thread() is not threading.main_thread() and Raises.has_raised:
            Raises.armed = Raises.has_raised = False
            told.set()
            may_go_on.wait(30 if held_in == "settle" else 2)
        method(life)

    def raise_in_backward():
        with contextlib.suppress(ArithmeticError):
            loss.backward()

    loss = engine(batch(1, 0, dist.get_rank(), 4))
    Raises.armed = True
    with mock.patch.object(BackwardLife, held_in, late):
        other = threading.Thread(target=raise_in_backward)
        other.start()
        assert told.wait(30)
        backward(engine, 2)
        may_go_on.set()
        other.join()
        engine.step()
    train_plain(plain, optimizer, 2)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error


@pytest.mark.sanitized
@vary("stage", [1, 2])
@vary("held_in", ["settle", "_release_handed_over"])
def test_a_backward_begins_while_another_is_dropped(ranks, held_in, stage):
    assert max(ranks(2).run(begin_while_another_is_dropped, Case(stage=stage, bucket=50), held_in)) < BOUND


def call_as_a_gradient_ends(case, how):
    """A user has tied a call of the engine to the end of a gradient that the engine drops. A step follows."""
    torch.manual_seed(0)
    module = Model().to(device())
    plain = copy.deepcopy(module)
    _, engine = start(case, module)
    optimizer = make_optimizer(plain, case)
    called = []

    def call():
        engine.zero_grad()
        called.append(gradient_counters(engine)["unreduced"])

    with engine.no_sync() if how == "unreduced" else contextlib.nullcontext():
        backward(engine, 0)
    kept = engine.optimizer.averaged_gradients[0] if how == "bound" else [p.grad for p in module.parameters()]
    weakref.finalize(next(each for each in kept if each is not None), call)
    del kept
    # Not zero_grad(), which empties `parameter.grad` by torch's own function first.
    engine.optimizer._zero12.backward.drop_step()
    assert called, "the gradient was not dropped"
    step_beside(engine, plain, optimizer, 1)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error


@vary("how", ["unreduced", "bound"])
def test_a_call_of_the_engine_as_a_gradient_ends(ranks, how):
    assert max(ranks(2).run(call_as_a_gradient_ends, Case(bucket=50), how)) < BOUND


class SomeGradients(NamedTuple):
    """The error of the gradients of the whole backward, and what asking for a parameter's gradient raised."""

    error: float
    message: str


def some_gradients_only(case):
    """torch.autograd.grad() for an activation, then a whole backward; and asking it for a parameter's gradient."""
    module, engine = start(case)
    plain = build(case)
    ids = batch(0, 0, dist.get_rank(), 4)
    seen = []
    hook = module.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    loss = engine(ids)
    hook.remove()
    torch.autograd.grad(loss, seen[0], retain_graph=True)
    engine.backward(loss, retain_graph=True)
    plain(ids).backward()
    average_gradients(plain)
    found = [safe_get_full_grad(parameter) for parameter in module.parameters()]
    error = relative_error(found, [parameter.grad for parameter in plain.parameters()])
    message = ""
    try:
        torch.autograd.grad(loss, module.head.weight)
    except RuntimeError as raised:
        message = str(raised)
    engine.destroy()
    return SomeGradients(error, message)


@pytest.mark.sanitized
def test_a_request_for_some_gradients_reduces_no_others(ranks):
    # As traced: torch does not let Inductor's backward run twice, which donates the buffers that it has saved.
    case = Case(model="SeveralGraphs", backend="eager")
    for some in ranks(2).run(some_gradients_only, case):
        assert some.error < BOUND
        assert "use safe_get_full_grad()" in some.message


class Watched(NamedTuple):
    """How many gradients a hook saw on a rank, and the error of the training."""

    gradients: int
    error: float


def hook_on_one_rank(case):
    """Rank 0 alone watches a gradient, as loggers do."""
    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    watched = []
    if dist.get_rank() == 0:
        module.blocks[1].up.weight.register_hook(lambda gradient: watched.append(gradient.norm()))
    _, engine = start(case, module)
    optimizer = make_optimizer(plain, case)
    for step in range(2):
        step_beside(engine, plain, optimizer, step)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return Watched(len(watched), error)


@pytest.mark.sanitized
def test_a_hook_on_one_rank(ranks):
    first, second = ranks(2).run(hook_on_one_rank, Case())
    assert (first.gradients, second.gradients) == (2, 0)
    assert max(first.error, second.error) < BOUND
