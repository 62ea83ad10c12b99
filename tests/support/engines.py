# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in ``test_engines.py``: several engines, an engine's end at any moment, a long run."""

import contextlib
import copy
import dataclasses
import gc
import random
import threading
import time
import weakref

import torch
import torch._functorch.config
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero12 import gradient_counters, wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param

from support.faults import Fragile, Injected, in_backward, in_forward, raise_injected
from support.lifetime import allocated_bytes
from support.models import BlocksWithin
from support.training import (
    average_gradients,
    batch,
    build,
    device,
    held,
    make_engine,
    make_optimizer,
    relative_error,
    total_error,
)


class _Beside:
    """An engine and a plain loop on the same batches."""

    def __init__(self, case, seed=0, module=None):
        self.case = case
        self.module = module or build(case, seed)
        self.plain = copy.deepcopy(self.module)
        self.before = copy.deepcopy(self.module)
        self.engine = make_engine(self.module, case)
        self.optimizer = make_optimizer(self.plain, case)

    def step(self, step):
        for micro_step in range(self.case.accumulation):
            ids = batch(step, micro_step, dist.get_rank(), 4)
            self.engine.backward(self.engine(ids))
            self.engine.step()
            (self.plain(ids) / self.case.accumulation).backward()
        self.plain_step()

    def plain_step(self):
        average_gradients(self.plain)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self):
        """Destroys the engine; returns the errors of its master parameters, of the largest and of all together."""
        masters = [safe_get_full_fp32_param(parameter) for parameter in self.module.parameters()]
        expected = list(self.plain.parameters())
        self.engine.destroy()
        return relative_error(masters, expected), total_error(masters, expected)


# More than one of anything -----------------------------------------------------------------------------------------


def take_turns(cases, steps=4):
    """Engines of one process train step by step in turns; returns each one's errors."""
    torch._dynamo.reset()
    pairs = [_Beside(case, seed) for seed, case in enumerate(cases)]
    for step in range(steps):
        for pair in pairs:
            pair.step(step)
    return [pair.end() for pair in pairs]


def turns_in_another_order(case):
    """Each rank steps two engines of one kind, every other rank in the other order.

    Returns what each engine raised, and whether parameters moved.
    """
    torch._dynamo.reset()
    pairs, raised = [_Beside(case) for _ in range(2)], []
    ids = batch(0, 0, dist.get_rank(), 4)
    for pair in reversed(pairs) if dist.get_rank() % 2 else pairs:
        try:
            pair.engine.backward(pair.engine(ids))
            pair.engine.step()
        except RuntimeError as error:
            raised.append(str(error))
    moved = [relative_error(pair.module.parameters(), pair.before.parameters()) > 0 for pair in pairs]
    for pair in pairs:
        pair.engine.destroy()
    return raised, moved


def one_loss_of_two_engines(cases):
    """One backward through two engines' models, as where a critic's loss goes into an actor's; returns the errors."""
    torch._dynamo.reset()
    pairs = [_Beside(case, seed) for seed, case in enumerate(cases)]
    for step in range(3):
        ids = batch(step, 0, dist.get_rank(), 4)
        first, second = (pair.engine(ids) for pair in pairs)
        (first * 2 + first.detach() * second).backward()
        first, second = (pair.plain(ids) for pair in pairs)
        (first * 2 + first.detach() * second).backward()
        for pair in pairs:
            pair.engine.step()
            pair.plain_step()
    return [pair.end() for pair in pairs]


def forwards_before_a_backward(case, direct):
    """Four forwards, then the backwards of two of them in the other order, then one backward of the others.

    Returns the errors. All forwards come first: a later one would begin a step anew.
    """
    torch._dynamo.reset()
    pair = _Beside(case)
    for step in range(3):
        batches = [batch(step, number, dist.get_rank(), 4) for number in range(4)]
        backward = torch.Tensor.backward if direct else pair.engine.backward
        first, second, *others = [pair.engine(each) for each in batches]
        backward(second)
        backward(first)
        backward(others[0] * others[1])
        pair.engine.step()
        (pair.plain(batches[0]) + pair.plain(batches[1])).backward()
        (pair.plain(batches[2]) * pair.plain(batches[3])).backward()
        pair.plain_step()
    return pair.end()


def backwards_of_one_forward(case, how):
    """Two losses of one forward with a backward each, and one that goes backward twice; returns the errors."""
    torch._dynamo.reset()
    pair = _Beside(case)
    # A backward whose graph gives its buffers away cannot run twice.
    torch._functorch.config.donated_buffer = False

    def backward(loss, number, retain_graph=False):
        if how == "loss" or (how == "both" and number % 2):
            loss.backward(retain_graph=retain_graph)
        else:
            pair.engine.backward(loss, retain_graph=retain_graph)

    for step in range(3):
        ids = batch(step, 0, dist.get_rank(), 4)
        loss = pair.engine(ids)
        for number in range(2):
            backward(loss * (1 + number), number, retain_graph=True)
        backward(loss.square(), 2)
        pair.engine.step()
        loss = pair.plain(ids)
        (3 * loss + loss.square()).backward()
        pair.plain_step()
    torch._functorch.config.donated_buffer = True
    return pair.end()


def computed_again(case, direct, both):
    """Outputs of two forwards, the first or both computed again in the backward of one loss; returns the errors."""
    torch._dynamo.reset()
    pair = _Beside(case)

    def loss_of(model, step):
        def run(factor, ids):
            return factor * model(ids)

        batches = [batch(step, number, dist.get_rank(), 4) for number in range(2)]
        # Something has to need a gradient in the forward that is thrown away.
        factor = torch.ones((), device=device(), requires_grad=True)
        first = checkpoint(run, factor, batches[0], use_reentrant=True)
        return first * (checkpoint(run, factor, batches[1], use_reentrant=True) if both else model(batches[1]))

    for step in range(3):
        (torch.Tensor.backward if direct else pair.engine.backward)(loss_of(pair.engine, step))
        pair.engine.step()
        loss_of(pair.plain, step).backward()
        pair.plain_step()
    return pair.end()


def module_called(case):
    """The engine's module is called instead of the engine, from its first forward on; returns the errors."""
    torch._dynamo.reset()
    pair = _Beside(case)
    for step in range(3):
        ids = batch(step, 0, dist.get_rank(), 4)
        pair.module(ids).backward()
        pair.engine.step()
        pair.plain(ids).backward()
        pair.plain_step()
    return pair.end()


def compiled_again(case):
    """``engine.compile()`` is called again between steps; returns the errors."""
    torch._dynamo.reset()
    pair = _Beside(case)
    for step in range(3):
        pair.step(step)
        pair.engine.compile(backend=case.backend)
    return pair.end()


def in_other_threads(cases):
    """Each step of each engine runs in a new thread, one at a time; returns the errors."""
    torch._dynamo.reset()
    pairs = [_Beside(case, seed) for seed, case in enumerate(cases)]
    own_device, raised = device(), []

    def run(pair, step):
        try:
            if own_device.type == "cuda":
                # Each thread has a current device of its own.
                torch.cuda.set_device(own_device)
            pair.step(step)
        except BaseException as error:
            raised.append(error)

    for step in range(3):
        for pair in pairs:
            thread = threading.Thread(target=run, args=(pair, step))
            thread.start()
            thread.join()
            if raised:
                raise raised[0]
    return [pair.end() for pair in pairs]


def second_engine(case, stages):
    """A second engine for a module whose first one has trained and is still alive.

    Returns the error when the second one has trained, what each use of the first then raises, how far that moved
    parameters, and the error when the second one has trained on.
    """
    torch._dynamo.reset()
    first = _Beside(dataclasses.replace(case, stage=stages[0]))
    first.step(0)
    second = _Beside(dataclasses.replace(case, stage=stages[1]), module=first.module)
    for step in range(1, 4):
        second.step(step)
    error = relative_error(second.module.parameters(), second.plain.parameters())
    before, raised = copy.deepcopy(second.module), []
    ids = batch(4, 0, dist.get_rank(), 4)
    for use in (lambda: first.engine.backward(first.engine(ids)), first.engine.step):
        try:
            use()
            raised.append(None)
        except Exception as exception:
            raised.append(f"{type(exception).__name__}: {exception}")
    moved = relative_error(second.module.parameters(), before.parameters())
    second.step(5)
    error_again = second.end()[0]
    first.engine.destroy()
    return error, raised, moved, error_again


# An engine's end ---------------------------------------------------------------------------------------------------


def destroyed_in_order(case, order):
    """Two engines are made for one module and destroyed in an order; returns how the module is called then."""
    torch._dynamo.reset()
    module = build(case)
    made = [make_engine(module, case) for _ in range(2)]
    for index in order:
        made[index].destroy()
    module(batch(0, 0, dist.get_rank(), 4)).backward()
    return module._compiled_call_impl, all(parameter.grad is not None for parameter in module.parameters())


def _hooks(module):
    """How many hooks there are of each kind, and how modules and parameters are called."""
    kinds = (
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    )
    of_modules = [len(getattr(each, kind)) for each in module.modules() for kind in kinds]
    of_parameters = [
        len(getattr(each, kind) or ())
        for each in module.parameters()
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
    ]
    return of_modules, of_parameters, [(type(each).__name__, each._compiled_call_impl) for each in module.modules()]


def _reach(moment, engine):
    """Brings an engine to a moment of training; returns what may still be holding on to it."""
    rank, kept = dist.get_rank(), []

    def forward(number=0):
        return engine(batch(number, 0, rank, 4))

    if moment == "after compile()":
        return kept
    engine.backward(forward())
    if moment == "between the micro-batches":
        engine.step()
        engine.backward(forward(1))
        return kept
    engine.step()
    engine.backward(forward())
    engine.step()
    if moment == "behind a step":
        return kept
    if moment == "in a forward":
        in_forward.happen = engine.destroy
        kept.append(forward(1))
        return kept
    if moment in ("in a backward", "behind a backward that raised"):
        in_backward.happen = engine.destroy if moment == "in a backward" else raise_injected
        with contextlib.suppress(RuntimeError, Injected):
            engine.backward(forward(1))
        return kept
    if moment == "behind a forward":
        kept.append(forward(1))
        return kept
    if moment == "without a reduction":
        with engine.no_sync():
            engine.backward(forward(1))
        return kept
    for number in range(engine.gradient_accumulation_steps()):
        engine.backward(forward(1 + number))
        if number + 1 < engine.gradient_accumulation_steps():
            engine.step()
    assert moment == "behind a backward"
    return kept


MOMENTS = (
    *("after compile()", "behind a forward", "in a forward", "in a backward", "between the micro-batches"),
    *("behind a backward", "without a reduction", "behind a step", "behind a backward that raised"),
)


def destroyed_at(moment, case):
    """Destroys an engine at a moment; returns what is left of it, and whether the module then works by itself.

    That is: (bytes held by the reducer and parameters registered, hooks before and after, whether gradient memory
    and the engine are gone, the error of the gradients of a plain backward, the error of a new engine on the module).
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = (BlocksWithin() if case.config else Fragile()).to(device())
    before = _hooks(module)
    engine = make_engine(module, case)
    reducer = engine.optimizer._zero12.reducer
    kept = _reach(moment, engine)
    views = [view for views in engine.optimizer.averaged_gradients.values() for view in views or ()]
    gradients = [weakref.ref(view.untyped_storage()) for view in views if view.numel()]
    del views
    engine.destroy()
    counters = {name: reducer.counters()[name] for name in ("bound", "pending", "bucket", "unreduced", "registered")}
    after = _hooks(module)
    reference = weakref.ref(engine)
    del engine, kept, reducer
    gc.collect()
    # A device's thread holds a backward that it was in for a moment longer, and the engine by DeepSpeed's callback of
    # it. What it lets go of then is part of a cycle.
    deadline = time.monotonic() + 5
    while torch.cuda.is_available() and reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    gone = all(gradient() is None for gradient in gradients) and reference() is None

    plain = copy.deepcopy(module)
    for each in (module, plain):
        for parameter in each.parameters():
            parameter.grad = None
        each(batch(5, 0, dist.get_rank(), 4)).backward()
    error = relative_error(*([p.grad for p in each.parameters()] for each in (module, plain)))
    module.zero_grad()
    again = make_engine(module, case)
    plain = copy.deepcopy(plain).to(device())
    plain.zero_grad()
    plain_optimizer = make_optimizer(plain, case)
    for micro_step in range(case.accumulation):
        ids = batch(6, micro_step, dist.get_rank(), 4)
        again.backward(again(ids))
        again.step()
        (plain(ids) / case.accumulation).backward()
    average_gradients(plain)
    plain_optimizer.step()
    wait_for_parameters(again)
    error_again = relative_error(module.parameters(), plain.parameters())
    again.destroy()
    return counters, before, after, gone, error, error_again


# Debugging aids of torch ---------------------------------------------------------------------------------------------


def beside_plain_loop_in_wrapped_groups(case):
    """Trains for three steps where torch wraps what communicates in a process group.

    Returns (the errors, seconds after which what the engine's group wraps gives up on another rank).
    """
    torch._dynamo.reset()
    pair = _Beside(case)
    wrapped = pair.engine.data_parallel_group._get_backend(device()).wrapped_pg
    for step in range(3):
        pair.step(step)
    return pair.end(), wrapped.options._timeout.total_seconds()


# A long run --------------------------------------------------------------------------------------------------------


def long_run(case, steps, settled):
    """Steps of 1 to 4 micro-batches with sequences of 3 to 20 tokens, beside a plain loop.

    Returns (most bytes held after any step; bytes allocated and number of Python objects, first when ``settled`` steps
    are done and then every so often; the errors).
    """
    torch._dynamo.reset()
    pair, rank = _Beside(case), dist.get_rank()
    # The same on every rank, and lengths of each rank's own.
    of_all, own = random.Random(1), random.Random(2 + rank)
    most_held, samples = 0, []
    for step in range(1, steps + 1):
        micro_batches = of_all.randint(1, 4)
        for micro_step in range(micro_batches):
            ids = batch(step, micro_step, rank, own.randint(3, 20))
            pair.engine.set_gradient_accumulation_boundary(micro_step == micro_batches - 1)
            pair.engine.backward(pair.engine(ids) / micro_batches)
            pair.engine.step()
            (pair.plain(ids) / micro_batches).backward()
        pair.plain_step()
        most_held = max(most_held, *held(gradient_counters(pair.engine)).values())
        if step % settled == 0:
            gc.collect()
            samples.append((allocated_bytes(ids.is_cuda), len(gc.get_objects())))
    return most_held, samples, pair.end()
