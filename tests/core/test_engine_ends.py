# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine's end at any moment, and engines that take over the module of an earlier one."""

import contextlib
import copy
import gc
import itertools
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param

from support.engines import OVERLAPPED, CaseBeside
from support.faults import Fragile, Injected, in_backward, in_forward, raise_injected
from support.ids import vary
from support.lifetime import backward, start
from support.models import BlocksWithin
from support.on_ranks import on_ranks
from support.options import outcome
from support.training import (
    BOUND,
    NOTHING,
    Case,
    batch,
    build,
    device,
    held,
    make_engine,
    make_optimizer,
    relative_error,
    step_plain,
)

# Several engines of one module ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "second-first"])
@on_ranks(1)
def test_two_engines_of_one_module_destroyed(order):
    """The end of the engine that came second would put back the compiled call of the first, which is gone."""
    module = build(Case())
    made = [make_engine(module, Case()) for _ in range(2)]
    for index in order:
        made[index].destroy()
    module(batch(0, 0, dist.get_rank(), 4)).backward()
    assert module._compiled_call_impl is None
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.follows("use that one, and destroy this one")
@pytest.mark.sanitized
@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (1, 2)], ids="stage{0[0]}-then-stage{0[1]}".format)
@vary("model", ["FillsPartition", "EagerBlocks"], slow=["OneGraph", "BlocksWithin"])
@on_ranks(2)
def test_second_engine_of_a_module(model, stages):
    """Graphs and hooks of a module's first engine would reduce gradients of the second one's steps again.

    Or the end of the first would take with it what the second needs.
    """
    first = CaseBeside(Case(model=model, stage=stages[0]))
    first.step(0)
    second = CaseBeside(Case(model=model, stage=stages[1]), module=first.module)
    for step in range(1, 4):
        second.step(step)
    error = second.error()
    before = copy.deepcopy(second.module)
    raised = [outcome(backward, first.engine, 4), outcome(first.engine.step)]
    moved = relative_error(second.module.parameters(), before.parameters())
    # As the error advises.
    first.engine.destroy()
    second.step(5)
    error_again = second.error()
    masters = [safe_get_full_fp32_param(parameter) for parameter in second.module.parameters()]
    second.engine.destroy()
    # One sentence, whatever the first engine is asked for.
    for sentence in raised:
        assert sentence is not None and "engine" in sentence and "\n" not in sentence, raised
    assert any("use that one, and destroy this one" in sentence for sentence in raised)
    assert moved == 0 and max(error, error_again) < BOUND
    # The parameters are linked with the second engine's.
    assert relative_error(masters, second.plain.parameters()) < BOUND


@on_ranks(2)
def test_the_end_of_an_engine_leaves_a_later_one_its_links():
    """Reads of a parameter's master weights would return zeros, and writes be lost."""
    first = CaseBeside(Case(model="FillsPartition"))
    first.step(0)
    second = CaseBeside(Case(model="FillsPartition", deepcompile=False), module=first.module)
    first.engine.destroy()
    second.step(1)
    masters = [safe_get_full_fp32_param(parameter) for parameter in second.module.parameters()]
    error = relative_error(masters, second.plain.parameters())
    second.engine.destroy()
    assert error < BOUND


@pytest.mark.follows("run the forward again with an engine that is alive")
@pytest.mark.sanitized
@on_ranks(1)
def test_a_graph_of_a_destroyed_engine_says_so():
    """A graph that outlives its engine would give its gradients to no one, and say nothing."""
    case = Case(model="FillsPartition")
    module, engine = start(case)
    backward(engine)
    engine.step()
    loss = engine(batch(1, 0, dist.get_rank(), 4))
    engine.destroy()
    said = outcome(loss.backward)
    assert "the engine was destroyed" in said and "with an engine that is alive" in said
    again = make_engine(module, case)
    backward(again, 1)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    again.step()
    assert not any(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
    again.destroy()


# The end of an engine at any moment -----------------------------------------------------------------------------


def _hooks(module):
    """How many hooks there are of each kind, and how modules are called."""
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
    return of_modules, of_parameters, calls


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
@on_ranks(2)
def test_destroyed_at_any_moment(moment, case):
    """The end of an engine would leave a hook, gradient memory or the engine alive where it has not foreseen it."""
    module = (BlocksWithin() if case.config else Fragile()).to(device())
    hooks_before = _hooks(module)
    engine = make_engine(module, case)
    reducer = engine.optimizer._deepcompile.reducer
    kept = _reach(moment, engine)
    views = [view for views in engine.optimizer.averaged_gradients.values() for view in views or ()]
    gradients = [weakref.ref(view.untyped_storage()) for view in views if view.numel()]
    del views
    engine.destroy()
    counters, hooks = reducer.counters(), _hooks(module)
    reference = weakref.ref(engine)
    del engine, kept, reducer
    gc.collect()
    # A device's thread holds a backward that it was in for a moment longer, and the engine by DeepSpeed's callback of
    # it. What it lets go of then is part of a cycle. On a CPU a thread of gloo holds what it sent.
    deadline = time.monotonic() + 5
    while any(left() is not None for left in (*gradients, reference)) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    is_gone = all(left() is None for left in (*gradients, reference))

    # The module then works by itself, and with a new engine.
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
    assert held(counters) == NOTHING and counters["registered"] == 0
    assert hooks == hooks_before
    assert is_gone
    assert max(error, error_again) < BOUND
