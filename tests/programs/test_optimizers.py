# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch and of other packages, trained without DeepCompile and with it.

Some in every run; ``make optimizers`` trains all that are installed, takes times and peaks, and prints a table.
"""

import contextlib
import time
from typing import Any, Dict, List, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.features.update.adam import AdamStep
from deepspeed.compile.features.update.own_ranges import OwnStep
from deepspeed.compile.tools.memory_picture.of_engine import tensors_of
from deepspeed.compile.tools.memory_picture.record import Recording, phase
from deepspeed.compile.zero_1_and_2.layout import Layout
from deepspeed.compile.zero_1_and_2.step.partitions import StepOfGroups, WholeStep
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from support.ids import case_ids, vary
from support.known_optimizers import IN_EVERY_RUN, KNOWN, ONE_PASS, RANGES, WHOLE, Known
from support.on_ranks import on_ranks
from support.optimizers import Momentum
from support.tables import OPTIMIZER
from support.training import (
    BOUND,
    as_traced,
    average_gradients,
    default_dtype,
    device,
    parameter_groups,
    ranges_of,
    step_in_one_pass,
    step_plain,
    total_error,
    updates_compiled_from,
)

# RAdamScheduleFree leaves the parameters as they are for five steps.
STEPS = 8
CLIPPING = 1.0
# Width and depth of a model whose partitions have more elements than a range has.
LARGE = {"cpu": (2048, 8), "cuda": (8192, 16)}
# What one step of a partition is, after the first steps -> how that is called.
STEPPED = {AdamStep: ONE_PASS, OwnStep: RANGES, WholeStep: WHOLE}


def pytest_generate_tests(metafunc):
    if metafunc.function is test_trains_as_without_deepcompile:
        both = [(stage, name) for stage in (1, 2) for name in KNOWN]
        # To import transformers takes long.
        few = [
            pytest.param(1 + index % 2, name, marks=pytest.mark.slow if KNOWN[name].package == "transformers" else [])
            for index, name in enumerate(IN_EVERY_RUN)
        ]
        cases = both if metafunc.config.option.every_optimizer else few
        metafunc.parametrize("stage, name", cases, ids=case_ids("stage, name", cases))


class Layers(torch.nn.Module):
    """Matrices alone, because torch's Muon takes nothing else."""

    def __init__(self, width=64, depth=6):
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x.float() - 0.5).square().mean()


def inputs(module, step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    batch = torch.randn(2, module.width, generator=generator)
    return batch.to(device(), module.layers[0].weight.dtype)


def engine_of(optimizer, module, deepcompile, stage):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "gradient_clipping": CLIPPING,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": module.layers[0].weight.dtype == torch.bfloat16},
        "compile": {"deepcompile": deepcompile},
    }
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    if deepcompile:
        engine.compile(backend="eager")
        step_in_one_pass(engine)
    return engine


@contextlib.contextmanager
def noted_steps():
    """Yields a set that has how partitions were stepped in the last step, of :data:`STEPPED`."""
    run, noted = StepOfGroups.run, set()

    def run_and_note(self):
        noted.clear()
        noted.update(STEPPED[type(step)] for step in self._steps)
        run(self)

    with mock.patch.object(StepOfGroups, "run", run_and_note):
        yield noted


class Trained(NamedTuple):
    masters: List[torch.Tensor]
    stepped: str  # how; "" without DeepCompile


def train(known, deepcompile, stage):
    torch._dynamo.reset()
    module = Layers().to(device())
    engine = engine_of(known.make(parameter_groups(module, known.groups)), module, deepcompile, stage)
    try:
        with noted_steps() as stepped:
            for step in range(STEPS):
                engine.backward(engine(inputs(module, step)))
                engine.step()
        masters = [safe_get_full_fp32_param(parameter).clone() for parameter in module.parameters()]
        return Trained(masters, " and ".join(stepped))
    finally:
        engine.destroy()


def train_plain(known):
    """Trains a plain loop; returns its parameters, and those with which it began."""
    module = Layers().to(device())
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = known.make(parameter_groups(module, known.groups))
    for step in range(STEPS):
        module(inputs(module, step)).backward()
        step_plain(module, optimizer, CLIPPING)
    return [parameter.detach() for parameter in module.parameters()], before


def train_by_shards(known, module, groups, steps):
    """Trains a plain loop whose optimizer has this rank's shards of a group as one parameter.

    Returns the parameters.
    """
    groups, world, rank = parameter_groups(module, groups), dist.get_world_size(), dist.get_rank()
    layouts = [Layout([(held, held.numel()) for held in group["params"]], world, rank) for group in groups]
    partitions = [torch.nn.Parameter(torch.zeros(layout.partition_numel, device=device())) for layout in layouts]
    optimizer = known.make([{**group, "params": [own]} for group, own in zip(groups, partitions, strict=True)])

    def cut(name):
        for layout, own in zip(layouts, partitions, strict=True):
            for piece in layout.own_pieces():
                values = getattr(piece.parameter, name).flatten()[piece.source_offset :][: piece.numel]
                getattr(own, name)[piece.offset : piece.offset + piece.numel] = values

    cut("data")
    for step in range(steps):
        module(inputs(module, step)).backward()
        average_gradients(module)
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIPPING)
        for own in partitions:
            own.grad = torch.zeros_like(own)
        cut("grad")
        optimizer.step()
        module.zero_grad()
        for layout, own in zip(layouts, partitions, strict=True):
            of_ranks = [torch.empty_like(own.data) for _ in range(world)]
            dist.all_gather(of_ranks, own.data)
            for place in layout.places:
                shards = [partition[place.offset :][: place.shard] for partition in of_ranks]
                place.parameter.data.copy_(torch.cat(shards)[: place.numel].view_as(place.parameter))
    return [parameter.detach() for parameter in module.parameters()]


class Beside(NamedTuple):
    """What came of an optimizer with DeepCompile. Errors are those of the master weights, all together."""

    stepped: str
    # Beside DeepCompile off. But an optimizer that looks at a whole partition finds other elements in it there, so its
    # error is beside a plain loop whose optimizer finds those of an even shard.
    error: float
    error_plain: float  # beside a plain loop
    moved: float  # how far a plain loop moved the parameters


def beside_off_and_plain(name, stage):
    known = KNOWN[name]
    with ranges_of(1000), updates_compiled_from(1024, 32), as_traced(device().type == "cpu"):
        on = train(known, True, stage)
        if known.stepped == WHOLE:
            expected = train_by_shards(known, Layers().to(device()), known.groups, STEPS)
        else:
            expected = train(known, False, stage).masters
        plain, before = train_plain(known)
    return Beside(
        on.stepped, total_error(on.masters, expected), total_error(on.masters, plain), total_error(plain, before)
    )


class Cost(NamedTuple):
    """Of ``engine.step()``, on this rank."""

    peak: int  # bytes, of parameters, states, gradients and what the step allocates
    seconds: float  # the fastest step; on a CPU, what this process has computed, because other processes may run
    stepped: str  # how; "" without DeepCompile


def cost(name, deepcompile):
    """Trains a model in bf16 that is large enough for each rule."""
    torch._dynamo.reset()
    with default_dtype(torch.bfloat16), torch.device(device()):
        module = Layers(*LARGE[device().type])
    engine = engine_of(KNOWN[name].make(parameter_groups(module, 1)), module, deepcompile, 1)
    now = time.process_time if device().type == "cpu" else time.perf_counter
    seconds = []
    with noted_steps() as stepped:
        for step in range(STEPS):
            if step == STEPS - 1:
                # On a CPU the profiler does not see the release of what was allocated before it began.
                recording = Recording(device(), tensors_of(engine))
            with phase("forward", device()):
                loss = engine(inputs(module, step))
            with phase("backward", device()):
                engine.backward(loss)
            dist.barrier()
            begun = now()
            with phase("step", device()):
                engine.step()
            seconds.append(now() - begun)
    memory = recording.stop({})
    engine.destroy()
    # The first steps make states and compile, and the last one is slowed by the recording.
    return Cost(memory.peak(*memory.phases["step"][-1]).bytes, min(seconds[2:-1]), " and ".join(stepped))


def how_it_fails(name, deepcompile, stage):
    try:
        train(KNOWN[name], deepcompile, stage)
    except Exception as error:
        return str(error)


@pytest.mark.table
def test_trains_as_without_deepcompile(ranks, request, record_property, stage, name):
    """An optimizer that is cut into ranges though it looks at whole parameters trains otherwise."""
    known = KNOWN[name]
    if known.version is None:
        pytest.skip(f"{known.package} is not installed")
    found: Dict[str, Any] = {"name": name, "stage": stage}
    record_property(OPTIMIZER, found)
    if known.fails:
        found["fails"] = "refused" if known.refused else "fails, as without"
        for deepcompile, part in ((False, known.fails), (True, known.refused or known.fails)):
            for said in ranks(2).run(how_it_fails, name, deepcompile, stage):
                assert part in said
        return
    results = ranks(2).run(beside_off_and_plain, name, stage)
    found["stepped"] = results[0].stepped
    found["error"], found["error_plain"] = max(r.error for r in results), max(r.error_plain for r in results)
    if request.config.option.every_optimizer and stage == 1:
        # One after the other: the next call finds the first engine collected.
        off, on = (ranks(2).run(cost, name, deepcompile) for deepcompile in (False, True))
        # Ranks hold as much as each other, and what a thread of gloo frees is not seen.
        found["peak"] = min(outcome.peak for outcome in on) / min(outcome.peak for outcome in off)
        found["time"] = max(outcome.seconds for outcome in on) / max(outcome.seconds for outcome in off)
        assert {outcome.stepped for outcome in on} == {known.stepped}
    for result in results:
        assert result.stepped == known.stepped
        assert result.error < BOUND and result.moved > 1e-3, result
        assert (result.error_plain < BOUND) == known.like_plain, result


# Blocks of 256 elements fill a partition of two ranks, and most of the parameters begin within one.
ODD = (40, 16)
UNCUT = {
    "Momentum": (Known(Momentum.__module__, Momentum.__name__, {"lr": 0.1}), "momentum", "count"),
    "AdamW8bit of torchao": (KNOWN["AdamW8bit of torchao"], "exp_avg", None),
}


@vary("stage", [1, 2])
@pytest.mark.parametrize("name", UNCUT)
@on_ranks(2)
def test_states_that_cannot_be_cut(name, stage):
    """Linking parameters with a state that cannot be cut there would raise in the first step.

    Such states stay whole. Whoever reads one is told that it is not found; others can be read.
    """
    known, uncut, other = UNCUT[name]
    if known.version is None:
        pytest.skip(f"{known.package} is not installed")
    said, counts = set(), set()
    with as_traced(True):
        expected = train_by_shards(known, Layers(*ODD).to(device()), 1, 3)
        module = Layers(*ODD).to(device())
        engine = engine_of(known.make(parameter_groups(module, 1)), module, True, stage)
        for step in range(3):
            engine.backward(engine(inputs(module, step)))
            engine.step()
    masters = [safe_get_full_fp32_param(parameter).clone() for parameter in module.parameters()]
    for parameter in module.parameters():
        if parameter._hp_mapping is not None:
            # As of any state that DeepSpeed does not know. A rank without a part of the parameter would wait.
            with pytest.raises(ValueError) as raised:
                safe_get_full_optimizer_state(parameter, uncut)
            said.add(str(raised.value))
        if other:
            counts.update(safe_get_full_optimizer_state(parameter, other).unique().tolist())
    kinds = {type(state[uncut]).__name__ for state in engine.optimizer.optimizer.state.values()}
    engine.destroy()
    assert total_error(masters, expected) < BOUND
    assert kinds == {"OptimState8bit" if known.package == "torchao" else "Uncut"}
    assert said == {f"{uncut} not found in optimizer state fragment"}
    assert counts == ({3.0} if other else set())


@on_ranks(2)
def test_averages_of_schedulefree():
    """The model would be evaluated with the parameters that are trained, and not with their averages.

    Its ``eval()`` turns master weights into averages, which ``update_lp_params()`` gives to the model.
    """
    pytest.importorskip("schedulefree")
    known = KNOWN["AdamWScheduleFree"]
    module, plain = Layers().to(device()), Layers().to(device())
    optimizers = [known.make(parameter_groups(model, known.groups)) for model in (module, plain)]
    engine = engine_of(optimizers[0], module, True, 1)
    for step in range(2 * STEPS):
        engine.backward(engine(inputs(module, step)))
        engine.step()
        plain(inputs(plain, step)).backward()
        step_plain(plain, optimizers[1], CLIPPING)
        if step == STEPS - 1:
            trained = [parameter.detach().clone() for parameter in plain.parameters()]
            for optimizer in optimizers:
                optimizer.eval()
            # The optimizer has changed the master weights.
            engine.optimizer.update_lp_params()
            averages = total_error(module.parameters(), plain.parameters())
            distance = total_error(trained, plain.parameters())
            for optimizer in optimizers:
                optimizer.train()
            engine.optimizer.update_lp_params()
    after = total_error(module.parameters(), plain.parameters())
    engine.destroy()
    assert max(averages, after) < BOUND and distance > 1e-3, (averages, after, distance)
