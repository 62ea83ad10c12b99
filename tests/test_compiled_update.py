# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A compiled update is the optimizer's own, to a rounding of fp32, and holds no gradient longer."""

import contextlib
import copy
import random
from typing import NamedTuple

import pytest
import torch
from torch._inductor import compile_fx

from deepspeed.accelerator import get_accelerator
from deepspeed.compile.zero12 import compiled_update, wait_for_parameters
from deepspeed.compile.zero12.chunked_step import Chunks
from deepspeed.compile.zero12.compiled_update import ALIGN_NUMEL, CompiledUpdates, StepOfGroup
from deepspeed.compile.zero12.gather import OverlappedGather
from deepspeed.compile.zero12.master_gradient import MasterGradient
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from support.beside import warnings_logged
from support.ids import vary
from support.lifetime import backward, start, targets_at_calls
from support.optimizers import MORE_OPTIMIZERS, OPTIMIZERS, Views, deepspeed_adam
from support.training import (
    OVERLAPPED,
    ROUNDING,
    Case,
    chunks_of,
    device,
    relative_error,
    updates_compiled_from,
)

NUMEL = 1000
LARGE = 64
# Roundings of fp32 in some steps. Each element's may be of the largest elements', because of differences.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def draw(seed, numel=NUMEL):
    """Draws bf16 gradients of all sizes, with padding between them; returns offset -> gradient, and all as one."""
    random.seed(seed)
    torch.manual_seed(seed)
    flat, gradients, offset = torch.zeros(numel), {}, random.choice([0, 3])
    while offset < numel - 20:
        size = min(random.choice([1, 7, 16, 40, 64, 100, 256]), numel - offset)
        gradients[offset] = torch.randn(size).bfloat16().to(device())
        flat[offset : offset + size] = gradients[offset]
        offset += size + random.choice([0, 0, 0, 1, 16])
    return Views(gradients), flat.to(device())


@pytest.mark.quick
@vary("seed", [*range(8)])
def test_ranges(seed):
    """Ranges follow each other to the end, are of whole vectors, and large aligned gradients are not copied."""
    with updates_compiled_from(ALIGN_NUMEL, LARGE):
        views, flat = draw(seed)
        # Keep the gradients, so that nothing else gets an address of theirs.
        held = [*views.values()]
        lie = {view.data_ptr(): offset for offset, view in views.items() if view.numel() >= LARGE}
        gradient, first, read = MasterGradient(views, None, flat, torch.bfloat16), 0, []
        while first < NUMEL:
            last = gradient.end_of_range(first, min(first + 300, NUMEL))
            assert first % ALIGN_NUMEL == 0 and first < last
            assert (last - first) % ALIGN_NUMEL == 0 or last == NUMEL
            taken = gradient.take_unscaled(first, last)
            assert torch.equal(taken.float(), flat[first:last]) and taken.data_ptr() % 16 == 0
            read += [offset for pointer, offset in lie.items() if pointer == taken.data_ptr()]
            first = last
        assert read == [offset for offset in lie.values() if offset % ALIGN_NUMEL == 0]
        assert held and not gradient._rest, "gradients are held longer than they are needed"


def step_beside(given, optimizer, whole, expected, updates, factor):
    """Steps one optimizer in compiled ranges and another one at once. Returns whether the update was compiled."""
    views, flat = given
    spans = [(offset, offset + view.numel()) for offset, view in views.items()]
    whole.grad = flat * factor
    expected.step()
    (parameter,) = optimizer.param_groups[0]["params"]
    new = torch.full((NUMEL,), 7.0, dtype=torch.bfloat16, device=device())
    gradient = MasterGradient(views, factor, parameter.data, torch.bfloat16)
    compiled = updates.begin(optimizer, 0, torch.bfloat16, torch.bfloat16, scaled=True)
    finished = []
    chunks = Chunks(
        *(optimizer, 0, gradient, lambda *span: new[slice(*span)], lambda *span: finished.append(span)), compiled
    )
    # Some gradients are stepped before the others, among them the last.
    spans = [spans[0], spans[2], spans[-1]]
    assert chunks.step_first(spans) == (compiled is not None)
    if compiled is not None:
        assert sum(last - first for first, last in finished) == sum(last - first for first, last in spans)
    chunks.step_rest()
    assert sum(last - first for first, last in finished) == NUMEL
    assert torch.equal(new, parameter.data.bfloat16())
    return compiled is not None


@contextlib.contextmanager
def as_recorded(runs):
    """Within it, recorded updates run as they are, without Inductor, if ``runs``."""
    compile_graph = compile_fx.compile_fx
    if runs:
        compile_fx.compile_fx = lambda graph, _: graph
    try:
        yield
    finally:
        compile_fx.compile_fx = compile_graph


@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE_OPTIMIZERS])
def test_updates_are_those_of_torch(name):
    # A C++ compiler takes long, so on a CPU most run as they are recorded.
    make = {**OPTIMIZERS, **MORE_OPTIMIZERS}[name]
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    chunked = copy.deepcopy(whole)
    expected, optimizer, updates = make([whole]), make([chunked]), CompiledUpdates()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (expected, optimizer)]
    recorded = device().type == "cpu" and name not in ("AdamW", "SGD")
    with updates_compiled_from(LARGE, LARGE), chunks_of(300), as_recorded(recorded):
        for step in range(8):
            factor = torch.full((1,), 1 / (1 + step), device=device())
            was_compiled = step_beside(draw(step), optimizer, whole, expected, updates, factor)
            assert was_compiled or step == 0
            for scheduler in schedulers:
                scheduler.step()
    assert len(updates._updates) == 1, "another learning rate needs no other update"
    # Torch's fused kernel rounds 1 - beta to fp32, which makes 1.3e-5 of the second moments.
    close = {"rtol": 3e-5, "atol": 1e-5} if name == "AdamW fused" else CLOSE
    torch.testing.assert_close(chunked, whole, **close)
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], **close)


@vary("adamw", [True, False])
def test_updates_of_deepspeed_adam(adamw):
    """Adam in C++, which nothing can record, does what torch's does."""

    def make(p):
        return deepspeed_adam(p, adamw, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)

    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    chunked = copy.deepcopy(whole)
    expected, optimizer, updates = make([whole]), make([chunked]), CompiledUpdates()
    with updates_compiled_from(LARGE, LARGE), chunks_of(300), as_recorded(device().type == "cpu" and not adamw):
        for step in range(6):
            factor = torch.full((1,), 0.5, device=device())
            assert step_beside(draw(step), optimizer, whole, expected, updates, factor) == (step > 0)
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-5, atol=1e-6)


def test_what_is_not_compiled():
    parameter = torch.nn.Parameter(torch.ones(NUMEL, device=device()))

    def compiled(optimizer, steps=1):
        for _ in range(steps):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return CompiledUpdates().begin(optimizer, 0, torch.bfloat16, torch.bfloat16, scaled=True) is not None

    with updates_compiled_from(LARGE), as_recorded(True):
        assert compiled(torch.optim.AdamW([parameter]))
        # The optimizer makes its states in the first step.
        assert not compiled(torch.optim.AdamW([parameter]), steps=0)
        assert compiled(torch.optim.SGD([parameter], lr=0.1), steps=0)
        assert not compiled(torch.optim.SGD([parameter], lr=0.1, momentum=0.9), steps=0)
        assert not compiled(deepspeed_adam([parameter], True, bias_correction=False))
        # A record would keep the value of a tensor.
        betas = torch.tensor(0.9), torch.tensor(0.99)
        assert not compiled(torch.optim.AdamW([parameter], lr=torch.tensor(0.1), betas=betas, foreach=False))
        assert compiled(torch.optim.AdamW([parameter], lr=torch.tensor(0.1), foreach=False))
    assert not compiled(torch.optim.AdamW([parameter])), "compiling takes longer than it saves"


@pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="kernels made for CPUs")
def test_fast_kernels_are_left_alone():
    parameter = torch.nn.Parameter(torch.ones(8))
    for make, has in (
        (lambda p: torch.optim.AdamW(p), False),
        (lambda p: torch.optim.AdamW(p, fused=True), True),
        (lambda p: deepspeed_adam(p, True), True),
    ):
        optimizer = make([parameter])
        assert compiled_update.has_fast_kernel(optimizer, optimizer.param_groups[0], parameter) == has


def test_settings_that_change_each_step():
    """A schedule of the weight decay compiles some updates, then none, and is right all along."""
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    chunked = copy.deepcopy(whole)
    expected, optimizer = torch.optim.AdamW([whole]), torch.optim.AdamW([chunked])
    updates, compiled = CompiledUpdates(), []
    with updates_compiled_from(LARGE, LARGE), as_recorded(True), warnings_logged() as said:
        for step in range(compiled_update.MAX_UPDATES + 4):
            for each in (expected, optimizer):
                each.param_groups[0]["weight_decay"] = 0.1 / (1 + step)
            factor = torch.ones(1, device=device())
            compiled.append(step_beside(draw(step), optimizer, whole, expected, updates, factor))
    assert compiled == [False] + [True] * compiled_update.MAX_UPDATES + [False] * 3
    assert len(updates._updates) == compiled_update.MAX_UPDATES
    assert len(said) == 1 and "in other settings than the learning rate" in said[0]
    torch.testing.assert_close(chunked, whole, **CLOSE)


def test_scalar_states_in_another_order():
    """A loaded state may have another order than the state with which the update was compiled."""
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    chunked = copy.deepcopy(whole)
    expected, optimizer, updates = torch.optim.NAdam([whole]), torch.optim.NAdam([chunked]), CompiledUpdates()
    with updates_compiled_from(LARGE, LARGE), as_recorded(True):
        for step in range(5):
            if step == 3:
                optimizer.state[chunked] = dict(reversed(optimizer.state[chunked].items()))
            factor = torch.ones(1, device=device())
            assert step_beside(draw(step), optimizer, whole, expected, updates, factor) == (step > 0)
    torch.testing.assert_close(chunked, whole, **CLOSE)


@vary("amsgrad", [False, True])
def test_new_values_may_be_written_over_gradients(amsgrad):
    """With offloading both are in one memory."""
    whole = torch.nn.Parameter(torch.randn(NUMEL, device=device()))
    chunked = copy.deepcopy(whole)
    expected, optimizer = (torch.optim.AdamW([each], lr=0.1, amsgrad=amsgrad) for each in (whole, chunked))
    updates, memory = CompiledUpdates(), torch.empty(NUMEL, dtype=torch.bfloat16, device=device())
    with updates_compiled_from(LARGE, LARGE), chunks_of(300), as_recorded(False):
        for _ in range(4):
            memory.normal_()
            whole.grad = memory.float()
            expected.step()
            gradient = MasterGradient(Views({0: memory}), None, chunked.data, torch.bfloat16)
            update = updates.begin(optimizer, 0, torch.bfloat16, torch.bfloat16, scaled=False)
            chunks = Chunks(optimizer, 0, gradient, lambda *span: memory[slice(*span)], lambda *_: None, update)
            chunks.step_rest()
            assert torch.equal(memory, chunked.data.bfloat16())
    torch.testing.assert_close(chunked, whole, **CLOSE)


# In an engine -------------------------------------------------------------------------------------------------------


class BothWays(NamedTuple):
    """An engine whose updates are compiled, beside one that steps chunk by chunk."""

    ranges: int  # that the compiled updates stepped
    error: float  # of the master weights, relative to their norm
    moved: float  # how far training moved them, relative to their norm
    states: float  # the error of momentum


def train_both_ways(case, folder, between=None):
    """Trains for five steps with compiled updates, and again without them.

    ``between``: what happens before the fourth step: "load" (of a checkpoint of that moment) or "offload" (of states).
    """
    run, ranges, seen = StepOfGroup.run, [], []
    StepOfGroup.run = lambda self, gradient, *rest: ranges.append(gradient.numel()) or run(self, gradient, *rest)
    try:
        for least in (2 * ALIGN_NUMEL, 2**30):
            # A C++ compiler takes long, so on a CPU some cases run as they are recorded.
            recorded = device().type == "cpu" and case.dtype == "fp32"
            with updates_compiled_from(least, 32), chunks_of(48), as_recorded(recorded):
                module, engine = start(case)
                # As with the backend "inductor", which would take long to compile the model.
                engine.optimizer._zero12.updates = CompiledUpdates()
                # DeepSpeed has no fp32 values of a frozen parameter, or of one without elements.
                trained = [each for each in module.parameters() if each.requires_grad and each.numel()]
                begin = [each.float().clone() for each in trained]
                for step in range(5 * case.accumulation):
                    if between == "load" and step == 3:
                        engine.save_checkpoint(folder, tag=str(least))
                        engine.load_checkpoint(folder, tag=str(least))
                    elif between == "offload" and step == 3:
                        engine.offload_states()
                        engine.reload_states()
                    backward(engine, step)
                    engine.step()
                seen.append([safe_get_full_fp32_param(each).clone() for each in trained])
                seen.append([safe_get_full_optimizer_state(each, "momentum_buffer").clone() for each in trained])
                engine.destroy()
    finally:
        StepOfGroup.run = run
    return BothWays(
        len(ranges), relative_error(seen[0], seen[2]), relative_error(seen[2], begin), relative_error(seen[1], seen[3])
    )


@vary(
    "varied",
    [
        {"accumulation": 2},
        {"model": "OddSizes", "groups": 2, "clipping": 0.05, "stage": 2},
        {"dtype": "bf16", "clipping": 0.1},
        {"groups": 2, "model": "AlignedBlocksWithin", "config": OVERLAPPED},
        {"dtype": "fp16"},
        # The first steps overflow.
        {"dtype": "fp16", "config": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}},
        {"between": "load", "groups": 2},
        {"between": "offload", "clipping": 0.05},
        {"offloaded": True, "stage": 2, "dtype": "bf16"},
        {"offloaded": True, "accumulation": 2, "clipping": 0.05},
        {"dtype": "bf16", "stage": 2, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    ],
)
def test_an_engine_compiles_its_updates(ranks, tmp_path, varied):
    between = varied.get("between")
    case = Case(**{"model": "RepeatedLayers", **{name: varied[name] for name in varied if name != "between"}})
    for both in ranks(2).run(train_both_ways, case, tmp_path, between):
        assert both.ranges > 10
        # A rounding of a master weight may round a parameter otherwise.
        assert both.error < ROUNDING[case.dtype] * both.moved and both.moved > 1e-3, both
        assert both.states < 4 * ROUNDING[case.dtype], both


def gradients_in_a_compiled_step(case):
    """Returns how many targets exist each time that a range is stepped."""
    with updates_compiled_from(2 * ALIGN_NUMEL, 32), chunks_of(48):
        _, engine = start(case)
        engine.optimizer._zero12.updates = CompiledUpdates()
        return targets_at_calls(StepOfGroup, "run", engine, steps=3)


def test_a_gradient_is_released_after_its_last_range(ranks):
    case = Case(dtype="bf16", model="RepeatedLayers")
    for counts in ranks(2).run(gradients_in_a_compiled_step, case):
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > 5 and counts[-1] <= 2


def updates_of(backend):
    _, engine = start(Case(backend=backend))
    updates = engine.optimizer._zero12.updates
    engine.destroy()
    return type(updates)


def test_updates_are_compiled_with_inductor(ranks):
    assert ranks(1).run(updates_of, "inductor") == [CompiledUpdates]
    assert ranks(1).run(updates_of, "eager") == [type(None)]


def order_of_a_step(case):
    """Returns what a step does, in order: "stepped" for each range, "first" and "rest" when units are sent."""
    done, run = [], StepOfGroup.run
    start_first, start_rest = OverlappedGather.start_first, OverlappedGather.start

    def noted(name, function):
        return lambda *args: done.append(name) or function(*args)

    StepOfGroup.run = noted("stepped", run)
    OverlappedGather.start_first = noted("first", start_first)
    OverlappedGather.start = noted("rest", start_rest)
    try:
        with updates_compiled_from(2 * ALIGN_NUMEL, 32), as_recorded(device().type == "cpu"):
            module, engine = start(case)
            engine.optimizer._zero12.updates = CompiledUpdates()
            for step in range(3):
                backward(engine, step)
                done.clear()
                engine.step()
            wait_for_parameters(engine)
            total = sum(parameter.double().sum().item() for parameter in module.parameters())
            engine.destroy()
    finally:
        StepOfGroup.run, OverlappedGather.start_first, OverlappedGather.start = run, start_first, start_rest
    return done, total


@vary("model", ["BlocksWithin", "AlignedBlocksWithin"])
@vary("groups", [1, 2])
def test_what_a_forward_needs_first_is_sent_first(ranks, model, groups):
    """The parameters outside of blocks are stepped and sent before the blocks are stepped."""
    case = Case(dtype="bf16", model=model, groups=groups, config=OVERLAPPED)
    (first, total), (second, other) = ranks(2).run(order_of_a_step, case)
    assert total == other
    for done in (first, second):
        assert done.count("first") == 1 and done[-1] == "rest", done
        assert "stepped" in done[done.index("first") :], "all was stepped before anything was sent"
        # Each rank has a part of them: embedding and head.
        assert "stepped" in done[: done.index("first")]
