# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""torch's limit of compilations: what uses it up, and what becomes of training when it is reached."""

import contextlib
import dataclasses
import inspect
import re
from typing import List
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from deepspeed.compile.features.blocks import compilation_limit
from deepspeed.compile.features.blocks.feature import Blocks

from support.beside import Beside, Outcome, check, warnings_logged
from support.ids import vary
from support.models import VOCABULARY, Block, BlocksWithin, Model
from support.on_ranks import on_ranks
from support.options import SMALL, prepare, train_prepared
from support.training import BOUND, REGIONAL, Case, batch

# How a warning says that training goes on without compiling.
GAVE_UP = re.compile("without compiled code")


def static(regional, **varied):
    """Graphs are for one shape each, so that lengths soon reach the limit."""
    config = {"compile": {"regional_compilation": regional}}
    return Case(config=config, compile_kwargs={"dynamic": False}, **varied)


def ids_of(step, length=4):
    return batch(step, 0, dist.get_rank(), length)


def given_up(warnings):
    return [warning for warning in warnings if GAVE_UP.search(warning)]


@dataclasses.dataclass(frozen=True)
class Limited(Outcome):
    """``given_up``: the warnings that training goes on without compiling. ``warnings``: all of DeepSpeed."""

    given_up: List[str]
    warnings: List[str]


def trained(make, case, steps, change, limit=None, length_of=lambda step: 4):
    """Takes steps, before each of which ``change(model, step)`` changes both models; returns what was seen."""
    limited = torch._dynamo.config.patch(recompile_limit=limit) if limit else contextlib.nullcontext()
    with warnings_logged() as warnings, limited:
        pair = Beside(make(width=4, depth=2), case)
        for step in range(steps):
            for model in (pair.module, pair.plain):
                change(model, step)
            pair.step(ids_of(step, length_of(step)))
        result = pair.end()
    return Limited(**vars(result), given_up=given_up(warnings), warnings=warnings)


class Branching(Model):
    """Takes another branch in each block whenever it is told to."""

    class block(Block):
        branch = "0"

        def forward(self, x):
            return super().forward(x) * (1 + int(self.branch) / 8)


def take_another_branch(model, step):
    for block in model.blocks:
        block.branch = str(step)


def train(case, what, rank, limit, steps=4):
    """Takes steps that differ each time in ``what`` on ``rank`` or, if it is None, on all; returns what was seen."""
    differs = rank in (None, dist.get_rank())

    def change(model, step):
        if differs and what == "branches":
            take_another_branch(model, step)

    def length_of(step):
        return 3 + step if differs and what == "lengths" else 4

    return trained(Branching, case, steps, change, limit, length_of)


def check_given_up(result):
    """Asserts that rank 0 has reached the limit. The others go on with compiled code."""
    check([result])
    assert len(result.given_up) == (dist.get_rank() == 0), result
    assert (result.from_graphs[-1] > 0) == (dist.get_rank() > 0), result


@vary("regional", [True, False])
@vary("what", ["lengths", "branches"])
@vary(
    "stage, world, rank, backend",
    [(1, 2, 0, "eager"), (2, 1, None, "eager")],
    expects="world",
    slow=[(1, 2, 0, "inductor")],
)
@on_ranks("world")
def test_limit_is_reached(stage, world, rank, backend, what, regional):
    """A rank that goes on uncompiled would reduce in another order than one that does not, or say nothing of it."""
    check_given_up(train(static(regional, stage=stage, backend=backend), what, rank, limit=1))


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters, reason="this torch has no such argument"
)
@vary("limit", [1, 3])
@on_ranks(1)
def test_the_limit_of_an_argument(limit):
    """The warning would name torch's own limit, which has no effect beside the argument."""
    case = dataclasses.replace(static(True), compile_kwargs={"dynamic": False, "recompile_limit": limit})
    (result,) = check([trained(Branching, case, 3, take_another_branch)])
    advised = [text.partition("To have it compiled as often as that, ")[2] for text in result.given_up]
    # The second limit is as advised.
    assert advised == ["raise compile_kwargs['recompile_limit'] before engine.compile()"][: limit == 1]


class Cut(Branching):
    """The graph of each block ends early, too."""

    class block(Branching.block):
        def forward(self, x):
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x * (1 + int(self.branch) / 8)


class Remembering(Branching):
    """What tells the branches has the name that transformers has for its cache."""

    class block(Branching.block):
        @property
        def branch(self):
            return self.past_key_values

        @branch.setter
        def branch(self, value):
            self.past_key_values = value


FAILED_GUARD = (
    r"a frame of block, because this guard of Dynamo failed: .*(branch|past_key_values) == '\d'.*in (forward|branch)"
)


@pytest.mark.options("compile.regional_compilation")
@vary("make, limit", [(Branching, 8), (Cut, 2), (Remembering, 8)], expects="limit")
@on_ranks(1)
def test_warnings_say_what_dynamo_says(make, limit):
    """A warning would blame a cache or other shapes where a branch is to blame, or hide where a graph ends early."""
    (result,) = check([trained(make, Case(config=REGIONAL), 6, take_another_branch, limit // 2)])
    (warning,) = (warning for warning in result.warnings if "compiled" in warning)
    begins = "DeepCompile has compiled one frame 5 times" if limit > 2 else "rank 0 goes on without compiled code"
    assert re.search(f"{begins}: {FAILED_GUARD}", warning), warning
    assert "cache" not in warning and "shapes" not in warning, warning
    graph_break = re.search(r"A graph of block ends early, at (\S+):\d+ \(User-inserted graph break", warning)
    assert (graph_break and graph_break[1]) == (__file__ if make is Cut else None), warning


@pytest.mark.quick
def test_a_dynamo_that_keeps_its_reasons_elsewhere():
    """A warning that cannot say why would end the training."""
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    graph.compile_subgraph_reason = "a graph break"
    with mock.patch.object(torch._dynamo.utils, "get_metrics_context", lambda: None):
        assert (compilation_limit.failed_guard(), compilation_limit.graph_break(graph)) == ("", "")


class Logging(Model):
    """Logs its loss under a new name in each step, as Lightning's ``log()`` does: a frame that has no parameters."""

    step = 0

    def forward(self, ids):
        loss = super().forward(ids)
        torch._dynamo.graph_break()
        self.log(f"loss of step {self.step}", loss)
        return loss

    def log(self, name, value):
        torch._dynamo.graph_break()
        self.logged = {name: value.detach() * len(name)}


@vary("lifted", [False, True])
@on_ranks(1)
def test_frames_without_parameters_do_not_count(lifted):
    """A frame that logs, and is compiled in each step, would end the compiling of those that train.

    Or it would be compiled for ever, where those that train need more compilations than torch allows by itself.
    """

    def change(model, step):
        model.step = str(step) * (step + 1)

    with mock.patch.object(compilation_limit.CompilationLimit, "_near_dynamo_limit", lifted):
        (result,) = check([trained(Logging, static(False), 12, change)])
    assert not result.given_up and result.from_graphs[-1] > 0, result
    compilations = sorted(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values())
    # Torch counts a frame once more before it stops. Where the limit is lifted, a frame without a graph has none.
    assert compilations[-2 if lifted else -1] <= torch._dynamo.config.recompile_limit + 1, compilations
    assert not [warning for warning in result.warnings if "has compiled one frame" in warning], result


@pytest.mark.options("compile.regional_compilation")
@vary("regional, graphs", [(None, 2), (False, 1)], expects="graphs")
@on_ranks(1)
def test_evaluation_compiles_nothing(regional, graphs):
    """The first evaluation would take as long as the first step, though a page says that it runs uncompiled.

    Or lengths that only evaluation sees would use up the compilations of training.
    Or GradCache's forward without gradients would run uncompiled, and draw other numbers than the one with them.
    """
    pair = Beside(BlocksWithin(), static(regional))
    # The graphs of a whole step have been compiled then.
    pair.step(ids_of(0))
    seen, stats = {}, torch._dynamo.utils.counters["stats"]

    def count(what, *mode):
        before = stats["unique_graphs"]
        pair.module.train(mode[0])
        # Some trainers leave a part in another mode than the module that they train.
        pair.module.body.train(mode[1])
        with torch.no_grad():
            pair.engine(ids_of(1))
        seen[what] = stats["unique_graphs"] - before

    count("evaluation", False, False)
    count("evaluation of a part in training mode", False, True)
    count("training", True, True)
    count("training of a part in evaluation mode", True, False)
    pair.end()
    assert list(seen.values()) == [0, 0, graphs, 0], seen


@vary("regional, from_graphs", [(True, 12), (False, 14)], expects="from_graphs")
@on_ranks(1)
def test_engines_use_nothing_up(regional, from_graphs):
    """Earlier engines of a process would use up the compilations of later ones."""
    results = []
    # Twice as many as torch's limit would do for a model as a whole, and four times as many as for its two blocks.
    with torch._dynamo.config.patch(recompile_limit=2):
        for seed in range(4):
            torch.manual_seed(seed)
            pair = Beside(Model(width=4, depth=2), static(regional), reset=False)
            pair.step(ids_of(seed))
            results.append(pair.end())
    check(results)
    assert [result.from_graphs for result in results] == [[from_graphs]] * 4


# Ranks that differ before they train -----------------------------------------------------------------------------


class First(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class Second(nn.Linear):
    def forward(self, x):
        return super().forward(torch.tanh(x))


class SecondBreaks(nn.Linear):
    def forward(self, x):
        x = torch.tanh(x)
        torch._dynamo.graph_break()
        return super().forward(x)


class TwoParts(nn.Module):
    """Each part is a graph of its own."""

    second = Second

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.parts = nn.ModuleList([First(width, width), self.second(width, width)])
        self.head = nn.Linear(width, VOCABULARY)

    @torch.compiler.disable(recursive=False)
    def forward(self, ids, last_first=False):
        x = self.embedding(ids)
        for part in reversed(self.parts) if last_first else self.parts:
            x = part(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class ThreeGraphs(TwoParts):
    """The same, with the graph of the second part broken in two."""

    second = SecondBreaks


@vary("make", [TwoParts, ThreeGraphs])
@vary("stage, mode", [(1, "evaluation"), (2, "training mode")])
@on_ranks(2)
def test_one_rank_evaluates_first(stage, mode, make):
    """Graphs that one rank compiles earlier, or in another order, would send their buckets in another order."""
    # All gradients fit in a bucket, so that it is a graph's end that sends it.
    pair = Beside(make(), Case(stage=stage, bucket=10**6))
    # Rank 0 alone calls the model before both train, its parts in the other order.
    if dist.get_rank() == 0:
        for length in (3, 5):
            if mode == "evaluation":
                pair.evaluate(ids_of(9, length), True)
            else:
                with torch.no_grad():
                    pair.engine(ids_of(9, length), True)
    for step in range(3):
        pair.step(ids_of(step))
    (result,) = check([pair.end()])
    assert result.from_graphs == [4] * 3


# Blocks that differ each time ------------------------------------------------------------------------------------


class Adapted(Block):
    """Uses some of its adapters, and other ones in each step."""

    used = ("a",)

    def __init__(self, width):
        super().__init__(width)
        self.adapters = nn.ParameterDict({name: torch.full((width,), 0.1) for name in "abcd"})

    def forward(self, x):
        for name in self.used:
            x = x + x * self.adapters[name]
        return super().forward(x)


class WithAdapters(Model):
    block = Adapted


SUBSETS = ["a", "ab", "b", "abc", "bcd"]


@vary("stage", [1, 2])
@on_ranks(1)
def test_blocks_that_differ_each_time(stage):
    """A block that uses other parameters each time would have gradients left that no graph reduces."""

    def change(model, step):
        for index, block in enumerate(model.blocks):
            block.used = tuple(SUBSETS[(step + index) % len(SUBSETS)])

    result = trained(WithAdapters, static(True, stage=stage), len(SUBSETS), change, 2)
    check_given_up(result)
    assert result.from_graphs[0] > 0


def compile_with_arguments(advised):
    """Asks for an error instead of uncompiled code behind the first forward, or before it, as advised.

    Returns what is said, whether the engine honours it, and the error of training it.
    """
    case = Case(model=SMALL)
    module, engine = prepare(case)
    with warnings_logged() as texts:
        if not advised:
            with torch.no_grad():
                engine(batch(0, 0, 0, 4))
            engine.compile(backend="eager")
        engine.compile(backend="eager", compile_kwargs={"fullgraph": True})
    honoured = engine.optimizer._deepcompile.find(Blocks)._limit._raises
    told = [text for text in texts if "arguments of engine.compile()" in text]
    return told, honoured, train_prepared(case, module, engine)


@pytest.mark.follows("or by an earlier call; call it before the first forward")
def test_arguments_that_come_late(ranks):
    """Nobody would be told that arguments have no effect, or they would have none before the first forward either."""
    ((told, honoured, error),) = ranks(1).run(compile_with_arguments, False)
    assert len(told) == 1 and "call it before the first forward" in told[0] and not honoured and error < BOUND
    ((told, honoured, error),) = ranks(1).run(compile_with_arguments, True)
    assert told == [] and honoured and error < BOUND
