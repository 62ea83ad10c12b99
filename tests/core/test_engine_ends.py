# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine's end at any moment, and engines that take over the module of an earlier one."""

import contextlib
import copy
import dataclasses
import gc
import itertools
import time
import weakref
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param

from support.engines import OVERLAPPED, CaseBeside
from support.faults import Fragile, Injected, in_backward, in_forward, raise_injected
from support.lifetime import backward, start
from support.models import BlocksWithin
from support.options import outcome
from support.training import (
    BOUND,
    NOTHING,
    Case,
    batch,
    build,
    device,
    make_engine,
    make_optimizer,
    relative_error,
    step_plain,
)

NOTHING_LEFT = {**NOTHING, "registered": 0}


# Several engines of one module ----------------------------------------------------------------------------------


class Module(NamedTuple):
    """A module whose engines were destroyed."""

    compiled_call: Optional[Any]  # how torch calls it
    trained: bool  # whether a backward gives each parameter a gradient


def destroyed_in_order(case, order):
    """Two engines are made for one module and destroyed in an order."""
    module = build(case)
    made = [make_engine(module, case) for _ in range(2)]
    for index in order:
        made[index].destroy()
    module(batch(0, 0, dist.get_rank(), 4)).backward()
    trained = all(parameter.grad is not None for parameter in module.parameters())
    return Module(module._compiled_call_impl, trained)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "second-first"])
def test_two_engines_of_one_module_destroyed(ranks, order):
    """The end of the engine that came second would put back the compiled call of the first, which is gone."""
    for module in ranks(1).run(destroyed_in_order, Case(), order):
        assert module.compiled_call is None and module.trained


class Second(NamedTuple):
    """What came of a second engine for a module."""

    error: float  # when the second engine has trained
    raised: List[Optional[str]]  # what each use of the first engine raises then
    moved: float  # how far these uses moved parameters
    error_again: float  # when the second engine has trained on
    error_of_masters: float  # of the master weights that the second engine's parameters are linked with then


def second_engine(case, stages):
    """A second engine for a module whose first one has trained and is still alive."""
    first = CaseBeside(dataclasses.replace(case, stage=stages[0]))
    first.step(0)
    second = CaseBeside(dataclasses.replace(case, stage=stages[1]), module=first.module)
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
    # As the error advises.
    first.engine.destroy()
    second.step(5)
    error_again = second.error()
    masters = [safe_get_full_fp32_param(parameter) for parameter in second.module.parameters()]
    error_of_masters = relative_error(masters, second.plain.parameters())
    second.engine.destroy()
    return Second(error, raised, moved, error_again, error_of_masters)


@pytest.mark.follows("use that one, and destroy this one")
@pytest.mark.sanitized
@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (1, 2)], ids="stage{0[0]}-then-stage{0[1]}".format)
@pytest.mark.parametrize(
    "model",
    [
        "FillsPartition",
        "EagerBlocks",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("OneGraph", "BlocksWithin")),
    ],
)
def test_second_engine_of_a_module(ranks, model, stages):
    """Graphs and hooks of a module's first engine would reduce gradients of the second one's steps again.

    Or the end of the first would take with it what the second needs.
    """
    for second in ranks(2).run(second_engine, Case(model=model), stages):
        assert second.error < BOUND
        # One sentence, whatever the first engine is asked for.
        for sentence in second.raised:
            assert sentence is not None and "engine" in sentence and "\n" not in sentence, second.raised
        assert any("use that one, and destroy this one" in sentence for sentence in second.raised)
        assert second.moved == 0 and second.error_again < BOUND and second.error_of_masters < BOUND


def links_after_an_earlier_end(case):
    """Returns the error of master weights of an engine that was made before an earlier one was destroyed."""
    first = CaseBeside(case)
    first.step(0)
    second = CaseBeside(dataclasses.replace(case, deepcompile=False), module=first.module)
    first.engine.destroy()
    second.step(1)
    masters = [safe_get_full_fp32_param(parameter) for parameter in second.module.parameters()]
    error = relative_error(masters, second.plain.parameters())
    second.engine.destroy()
    return error


def test_the_end_of_an_engine_leaves_a_later_one_its_links(ranks):
    """Reads of a parameter's master weights would return zeros, and writes be lost."""
    for error in ranks(2).run(links_after_an_earlier_end, Case(model="FillsPartition")):
        assert error < BOUND


def use_after_destroy(case):
    """Returns what a backward through a graph of a destroyed engine says, and whether a later engine trains."""
    module, engine = start(case)
    backward(engine)
    engine.step()
    loss = engine(batch(1, 0, dist.get_rank(), 4))
    engine.destroy()
    said = outcome(loss.backward)
    again = make_engine(module, case)
    again.backward(again(batch(1, 0, dist.get_rank(), 4)))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    again.step()
    moved = [not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True)]
    again.destroy()
    return said, all(moved)


@pytest.mark.follows("run the forward again with an engine that is alive")
@pytest.mark.sanitized
def test_a_graph_of_a_destroyed_engine_says_so(ranks):
    """A graph that outlives its engine would give its gradients to no one, and say nothing."""
    ((message, trains),) = ranks(1).run(use_after_destroy, Case(model="FillsPartition"))
    assert "the engine was destroyed" in message and "with an engine that is alive" in message and trains


# The end of an engine at any moment -----------------------------------------------------------------------------


class Hooks(NamedTuple):
    """How many hooks there are of each kind, and how modules and parameters are called."""

    of_modules: List[int]
    of_parameters: List[int]
    calls: List[Tuple[str, Any]]


def _hooks(module):
    kinds = (
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    )
    of_modules = [len(getattr(submodule, kind)) for submodule in module.modules() for kind in kinds]
    of_parameters = [
        len(getattr(parameter, kind) or ())
        for parameter in module.parameters()
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
    ]
    calls = [(type(submodule).__name__, submodule._compiled_call_impl) for submodule in module.modules()]
    return Hooks(of_modules, of_parameters, calls)


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


class Destroyed(NamedTuple):
    """What is left of an engine that was destroyed, and whether its module then works by itself."""

    counters: Dict[str, int]  # bytes held by the reducer, and parameters registered
    before: Hooks  # of the module before there was an engine
    after: Hooks
    gone: bool  # whether gradient memory and the engine are
    error: float  # of the gradients of a plain backward
    error_again: float  # of a new engine on the module


def destroyed_at(moment, case):
    """Destroys an engine at a moment."""
    module = (BlocksWithin() if case.config else Fragile()).to(device())
    before = _hooks(module)
    engine = make_engine(module, case)
    reducer = engine.optimizer._deepcompile.reducer
    kept = _reach(moment, engine)
    views = [view for views in engine.optimizer.averaged_gradients.values() for view in views or ()]
    gradients = [weakref.ref(view.untyped_storage()) for view in views if view.numel()]
    del views
    engine.destroy()
    counters = {name: reducer.counters()[name] for name in NOTHING_LEFT}
    after = _hooks(module)
    reference = weakref.ref(engine)
    del engine, kept, reducer
    gc.collect()
    # A device's thread holds a backward that it was in for a moment longer, and the engine by DeepSpeed's callback of
    # it. What it lets go of then is part of a cycle. On a CPU a thread of gloo holds what it sent.
    deadline = time.monotonic() + 5
    while any(left() is not None for left in (*gradients, reference)) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    gone = all(left() is None for left in (*gradients, reference))

    plain = copy.deepcopy(module)
    for model in (module, plain):
        for parameter in model.parameters():
            parameter.grad = None
        model(batch(5, 0, dist.get_rank(), 4)).backward()
    error = relative_error(*([p.grad for p in model.parameters()] for model in (module, plain)))
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
    step_plain(plain, plain_optimizer)
    wait_for_parameters(again)
    error_again = relative_error(module.parameters(), plain.parameters())
    again.destroy()
    return Destroyed(counters, before, after, gone, error, error_again)


def moment_id(value):
    if isinstance(value, str):
        return value.replace(" ", "-")
    return f"stage{value.stage}-acc{value.accumulation}" + ("-overlapped" if value.config else "")


@pytest.mark.sanitized
@pytest.mark.parametrize(
    "moment, case",
    [
        *zip(
            MOMENTS,
            # ZeRO-2 has no no_sync().
            itertools.cycle([Case(stage=1, accumulation=2, bucket=50), Case(stage=2, bucket=50)]),
        ),
        ("behind a step", Case(stage=1, config=OVERLAPPED)),
        ("behind a backward", Case(stage=2, config=OVERLAPPED)),
    ],
    ids=moment_id,
)
def test_destroyed_at_any_moment(ranks, moment, case):
    """The end of an engine would leave a hook, gradient memory or the engine alive where it has not foreseen it."""
    for destroyed in ranks(2).run(destroyed_at, moment, case):
        assert destroyed.counters == NOTHING_LEFT
        assert destroyed.after == destroyed.before
        assert destroyed.gone
        assert max(destroyed.error, destroyed.error_again) < BOUND
