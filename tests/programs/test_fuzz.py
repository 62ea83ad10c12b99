# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Random models under random options train as a plain loop does.

    pytest tests/programs/test_fuzz.py --models 1000 --seed 7

tries as many as asked from a seed and prints how many agreed, and of those that did not the smallest that is found.
"""

import collections
import contextlib
import copy
import dataclasses
import math
from typing import List
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from deepspeed.compile.features.blocks.block_calls import BlockParentCall
from deepspeed.compile.features.shard_parameters import feature, outside, passes, unsharded_parameters
from deepspeed.compile.features.update.dynamic_map import BLOCK
from deepspeed.compile.features.update.every_step import EveryStepAdam
from deepspeed.compile.zero_1_and_2 import gradient_counters, wait_for_parameters
from deepspeed.compile.zero_1_and_2.engine import state
from deepspeed.compile.zero_1_and_2.step.partition_gradient import ALIGN_NUMEL
from deepspeed.utils import safe_get_full_fp32_param

from support.chunked_loss import small_chunks
from support.faults import Injected, in_backward, raise_injected
from support.ids import vary
from support.parameter_gather import one_rank_late
from support.recipes import (
    BUFFERED,
    CHANGING,
    EVALUATIONS,
    FREEZES,
    IGNORED,
    KINDS,
    ORDERS,
    STEPS,
    Piece,
    Recipe,
    build,
    change_hooks,
)
from support.training import (
    BOUND,
    Case,
    as_traced,
    average_gradients,
    batch,
    held,
    make_engine,
    make_optimizer,
    parameter_groups,
    ranges_of,
    relative_error,
    step_in_one_pass,
    total_error,
    updates_compiled_from,
)

# What the ranks do -------------------------------------------------------------------------------------------------


# How a micro-batch's gradients are dropped.
DROPS = {
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "module": lambda engine: engine.module.zero_grad(),
    "by hand": lambda engine: [setattr(parameter, "grad", None) for parameter in engine.module.parameters()],
}


# More than a random model takes for any of its frames.
MANY_COMPILATIONS = 64


def as_case(recipe, module, deepcompile):
    # DeepSpeed takes no parameter group without elements.
    groups = parameter_groups(module, recipe.groups)
    have_elements = all(any(parameter.numel() for parameter in group["params"]) for group in groups)
    compile_options = {
        "regional_compilation": recipe.regional,
        "overlap_param_gather": recipe.overlap_gather,
        "activation_memory_budget": recipe.activation_budget,
    }
    if recipe.eight_bits and deepcompile:
        compile_options["optimizer_states"] = "8bit"
    if recipe.remainders and deepcompile:
        compile_options["store_param_remainders"] = True
    if recipe.shards_trained:
        compile_options["shard_parameters"] = "all"
    elif recipe.shards:
        compile_options["shard_parameters"] = "frozen"
    return Case(
        stage=recipe.stage,
        accumulation=recipe.accumulation,
        backend=recipe.backend,
        bucket=recipe.bucket,
        groups=recipe.groups if have_elements else 1,
        clipping=recipe.clipping,
        offloaded=recipe.offloaded,
        adam=recipe.adam,
        # Adam divides by the size of gradients, and only this is added to that.
        eps=0.1 * recipe.loss_scale,
        dtype=recipe.dtype,
        deepcompile=deepcompile,
        config={
            "zero_optimization": {
                "round_robin_gradients": recipe.round_robin,
                "overlap_comm": recipe.overlap_comm,
            },
            # These options belong to DeepCompile.
            "compile": compile_options if deepcompile else {},
        },
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """What a model came to beside a plain loop."""

    error: float  # the largest of a parameter
    total_error: float  # of all parameters together
    moved: float  # how far the parameters went
    total_moved: float  # how far those of the plain loop went, all together
    held: List[int]  # bytes held after each step
    sums: List[float]  # of parameters and master weights
    masters: List[torch.Tensor]  # of all parameters, where these are in low precision
    ties: bool  # whether a master weight was half-way between two parameters before the last step


def train(recipe, deepcompile=True):
    """Trains a model as its recipe says, in an engine and in a plain loop.

    Without DeepCompile nothing is made to raise.
    """
    torch._dynamo.reset()
    # A backward whose graph gives its buffers away cannot run twice.
    torch._functorch.config.donated_buffer = not recipe.twice
    # A rank that stops to compile trains reentrant checkpoints as torch does without a compiler: see Body.as_compiled.
    recompile_limit = torch._dynamo.config.recompile_limit
    if recipe.embedding_frozen:
        torch._dynamo.config.recompile_limit = MANY_COMPILATIONS
    module = build(recipe)
    case = as_case(recipe, module, deepcompile)
    if recipe.dtype != "fp32":
        # The engine begins with rounded parameters, and so shall the plain loop.
        module.to({"bf16": torch.bfloat16, "fp16": torch.float16}[recipe.dtype]).float()
    before, plain = copy.deepcopy(module), copy.deepcopy(module)
    handles, plain_handles = {}, {}
    change_hooks(module, -1, handles)
    change_hooks(plain, -1, plain_handles)
    engine = make_engine(module, case)
    optimizer = make_optimizer(plain, case)
    plain_loop, rate = _PlainLoop(recipe, plain, optimizer), optimizer.param_groups[0]["lr"]
    after_steps, ties = [], [False]
    try:
        # Generated code shall draw the random numbers that torch draws.
        with (
            torch._inductor.config.patch(fallback_random=True),
            _updates(recipe, engine, deepcompile),
            small_chunks(numel=64) if recipe.chunked_loss else contextlib.nullcontext(),
        ):
            for step in range(recipe.steps):
                change_hooks(module, step, handles)
                change_hooks(plain, step, plain_handles)
                with unsharded_parameters(engine):
                    _change_data(recipe, module, step)
                _change_data(recipe, plain, step)
                micro_batches = [_micro_batch_of(recipe, step, index) for index in range(recipe.accumulation)]
                if recipe.alone and step == 0:
                    _evaluate(recipe, engine, micro_batches[0])
                if recipe.raises and step == 1 and deepcompile:
                    _raise(recipe, engine, micro_batches)
                    plain_loop.forward_alone(micro_batches)
                if recipe.drops is not None and step == recipe.steps - 1:
                    _drop(recipe, engine, micro_batches[0])
                    plain_loop.forward_alone(micro_batches[:1])
                for group in (*engine.optimizer.param_groups, *optimizer.param_groups):
                    group["lr"] = 0.0 if recipe.rests and step == 1 else rate
                with one_rank_late(0.02) if recipe.reads is not None else contextlib.nullcontext():
                    _step(recipe, engine, micro_batches)
                    _read(recipe, engine, module)
                plain.body.as_compiled = deepcompile and _runs_compiled(module.body if recipe.body_within else module)
                plain_loop.step(micro_batches)
                if deepcompile:
                    after_steps.append(sum(held(gradient_counters(engine)).values()))
                    ties.append(_has_ties(engine))
        wait_for_parameters(engine)
        masters = engine.optimizer.single_partition_of_fp32_groups
        masters = [] if recipe.remainders else [master.detach().cpu() for master in masters]
        with unsharded_parameters(engine):
            actual, expected = list(module.parameters()), list(plain.parameters())
            if recipe.dtype != "fp32":
                # Frozen and empty ones have no master.
                has_master = [parameter.requires_grad and parameter.numel() > 0 for parameter in actual]
                actual = [
                    safe_get_full_fp32_param(parameter) if has else parameter
                    for parameter, has in zip(actual, has_master)
                ]
            return Result(
                error=relative_error(actual, expected),
                total_error=total_error(actual, expected),
                moved=relative_error(module.parameters(), before.parameters()),
                total_moved=total_error(plain.parameters(), before.parameters()),
                held=after_steps,
                masters=[] if recipe.dtype == "fp32" else [parameter.detach().cpu() for parameter in actual],
                ties=any(ties[:-1]),
                sums=[parameter.detach().double().sum().item() for parameter in (*module.parameters(), *masters)],
            )
    finally:
        torch._functorch.config.donated_buffer = True
        torch._dynamo.config.recompile_limit = recompile_limit
        engine.destroy()


class Hooked(passes.Passes):
    """Has the hooks of large parameters outside of blocks, but no units of them."""

    def __init__(self, module, blocks, units, large, moments):
        super().__init__(module, blocks, units, large, moments)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        large = outside.large_outside(trained, module, blocks) if blocks else ()
        self.gather_at_calls(module, blocks, dict.fromkeys(large, lambda: None))


def train_whole(recipe):
    """Trains with whole parameters, in the graphs that there are with sharded ones.

    Sharding cuts graphs at blocks also where a model calls its blocks itself, or where compiled code calls them. If
    code that is not compiled calls a module with a hook, Dynamo compiles the call by itself, and a graph gives the
    module's gradients. Other graphs add the gradients of a tensor that several operators read in another order.
    """
    none = mock.patch.object(feature, "frozen_of_blocks", lambda module, blocks, trained: [[]] * len(blocks))
    hooked = Hooked if recipe.shards_trained else passes.Passes
    with none, mock.patch.object(feature, "Passes", hooked):
        return train(dataclasses.replace(recipe, shards_trained=False, shards=True))


def train_with_masters(recipe):
    """Trains with fp32 master weights, by the arithmetic that steps remainders.

    Torch steps small partitions, and makes the first step, with other roundings.
    """
    recipe = dataclasses.replace(recipe, remainders=False)
    if recipe.eight_bits:
        return train(recipe)
    with mock.patch.object(state, "rules_of", lambda features: [EveryStepAdam()]):
        return train(recipe)


def _read(recipe, engine, module):
    """Reads a parameter behind a step, which may be on its way. Raises if the value is not that of the step."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if recipe.reads is not None:
        parameter = trained[recipe.reads % len(trained)]
        read = parameter.detach().clone()
        wait_for_parameters(engine)
        assert torch.equal(read.nan_to_num(), parameter.nan_to_num()), "a parameter was read before it had arrived"


def _has_ties(engine):
    """Whether a master weight of this rank is half-way between two parameters, of which torch may take the other."""
    masters = getattr(engine.optimizer, "masters_as_remainders", None)
    return masters is not None and any((remainder == -(2**15)).any() for remainder in masters.remainders)


def _runs_compiled(module):
    """Whether torch.compile traces what a module of an engine does around the modules that it calls."""
    return not isinstance(module._compiled_call_impl, BlockParentCall)


@contextlib.contextmanager
def _updates(recipe, engine, deepcompile):
    """Within it the optimizer steps as the recipe says."""
    if not (recipe.one_pass and deepcompile):
        yield
        return
    step_in_one_pass(engine)
    # A pass that runs as it was traced is as right as a compiled one, and a C++ compiler takes long.
    # A range has whole blocks of 8-bit states.
    numel = 2 * BLOCK if recipe.eight_bits else 48
    with updates_compiled_from(2 * ALIGN_NUMEL, 32), ranges_of(numel), as_traced(recipe.backend == "eager"):
        yield


@dataclasses.dataclass
class MicroBatch:
    """What a rank is given; ``inputs`` has the ids for each loss, of which no token counts if it ``ignores`` them."""

    step: int
    index: int
    inputs: List[torch.Tensor]
    skips: bool
    ignores: bool
    loss_scale: float

    def forward(self, model, number):
        """Returns the loss of that number, from the random numbers that it has in whichever loop."""
        torch.manual_seed(((self.step * 10 + self.index) * 10 + number) * 10 + dist.get_rank())
        return self.call(model, number) * self.loss_scale / len(self.inputs)

    def call(self, model, number=0, skips=None):
        ids = self.inputs[number]
        labels = torch.full_like(ids, IGNORED) if self.ignores else ids
        return model(ids, self.skips if skips is None else skips, labels)


def _micro_batch_of(recipe, step, index):
    rank = dist.get_rank()
    ids = batch(step, index, rank, recipe.lengths[(step + rank) % len(recipe.lengths)])
    if recipe.uneven and step % 2 == 1 and rank == 0:
        ids = ids[:1]
    skips = (step + (rank + index if recipe.each_rank_skips else 0)) % 2 == 1
    inputs = [ids.roll(number, 1) for number in range(recipe.losses)]
    ignores = recipe.ignores is not None and step % 2 == 1 and rank == 0
    return MicroBatch(step, index, inputs, skips, ignores, recipe.loss_scale)


class _PlainLoop:
    def __init__(self, recipe, module, optimizer):
        self.recipe, self.module, self.optimizer = recipe, module, optimizer
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.masters = [parameter.detach().clone() for parameter in self.trained]

    def forward_alone(self, micro_batches):
        """Runs forwards whose gradients nobody has. What they change in parameters stays until the step."""
        with torch.no_grad():
            for micro_batch in micro_batches:
                for number in range(self.recipe.losses):
                    micro_batch.forward(self.module, number)

    def step(self, micro_batches):
        for micro_batch in micro_batches:
            if self.recipe.penalized:
                _penalty(self.recipe, self.module).backward()
            for number in range(self.recipe.losses):
                loss = micro_batch.forward(self.module, number) / self.recipe.accumulation
                with _between(self.recipe, self.module, micro_batch):
                    loss.backward()
            if self.recipe.clips and micro_batch is not micro_batches[-1]:
                clip_own(self.trained)
        average_gradients(self.module)
        if self.recipe.clipping:
            torch.nn.utils.clip_grad_norm_(self.trained, self.recipe.clipping)
        # What a forward changed in parameters is gone, because the optimizer has its own copy of each.
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.data.copy_(master)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.masters = [parameter.detach().clone() for parameter in self.trained]


def _penalty(recipe, module):
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return 0.05 * recipe.loss_scale * sum(parameter.square().sum() for parameter in trained) / recipe.accumulation


@contextlib.contextmanager
def _between(recipe, module, micro_batch):
    """Within it, which is behind a forward, the first parameter is frozen and buffers are others, if the recipe asks.

    Buffers are as before behind it, because an engine may run several forwards before their backwards.
    """
    buffers = list(module.buffers()) if recipe.changes_buffers else []
    freezes = recipe.freezes and micro_batch.step % 2 == 1
    first = next(parameter for parameter in module.parameters() if parameter.requires_grad) if freezes else None
    if first is not None:
        first.requires_grad_(False)
    for buffer in buffers:
        buffer.data.mul_(4)
    try:
        yield
    finally:
        for buffer in buffers:
            buffer.data.div_(4)
        if first is not None:
            first.requires_grad_(True)


def _change_data(recipe, module, step):
    """Changes what the recipe says before a step."""
    if recipe.changes_parameters and step == 1:
        for trains in (True, False):
            for parameter in [parameter for parameter in module.parameters() if parameter.requires_grad == trains][:1]:
                parameter.data.mul_(0.5)
    for buffer in module.buffers() if recipe.changes_buffers else ():
        buffer.data.mul_(0.5)


def _move(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.clone()


def clip_own(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.05)


def _step(recipe, engine, micro_batches):
    if recipe.says == "coalesce_grad_reduction":
        with engine.coalesce_grad_reduction():
            for micro_batch in micro_batches:
                _run(recipe, engine, micro_batch)
    else:
        for micro_batch in micro_batches:
            last = micro_batch is micro_batches[-1]
            if recipe.says != "counted":
                engine.set_gradient_accumulation_boundary(last)
            with engine.no_sync() if recipe.says == "no_sync" and not last else contextlib.nullcontext():
                _run(recipe, engine, micro_batch)
            if recipe.says == "counted" or (recipe.says == "boundary" and not last):
                engine.step()
            if recipe.clips and not last:
                clip_own(engine.module.parameters())
    if recipe.says != "counted":
        engine.set_gradient_accumulation_boundary(True)
        engine.step()


def _raise(recipe, engine, micro_batches):
    """The micro-batches of a step, of which the last raises: the step begins anew."""
    for micro_batch in micro_batches[:-1]:
        _run(recipe, engine, micro_batch)
        engine.step()
    in_backward.happen = raise_injected
    try:
        _run(recipe, engine, micro_batches[-1])
    except Injected:
        return
    raise AssertionError("nothing was raised")


def _drop(recipe, engine, micro_batch):
    """A micro-batch that is not counted and whose gradients are dropped."""
    if recipe.says != "counted":
        engine.set_gradient_accumulation_boundary(recipe.accumulation == 1)
    with engine.no_sync() if recipe.says == "no_sync" else contextlib.nullcontext():
        _run(recipe, engine, micro_batch)
    DROPS[recipe.drops](engine)


def _run(recipe, engine, micro_batch):
    # A forward behind a backward at the boundary begins the step anew, as without DeepCompile. A region has none.
    waiting, forwards_first = [], recipe.together or recipe.says != "coalesce_grad_reduction"
    if recipe.penalized:
        _penalty(recipe, engine.module).backward()
    if recipe.moves and (micro_batch.step, micro_batch.index) == (1, 0) and in_backward.happen is None:
        in_backward.happen = lambda: _move(engine.module)
    for number in range(recipe.losses):
        waiting.append(micro_batch.forward(engine, number))
        if not forwards_first:
            with _between(recipe, engine.module, micro_batch):
                _backward(recipe, engine, waiting.pop())
    with _between(recipe, engine.module, micro_batch):
        for loss in [sum(waiting)] if recipe.together else waiting:
            _backward(recipe, engine, loss)
    _evaluate(recipe, engine, micro_batch)


def _backward(recipe, engine, loss):
    loss = loss / 2 if recipe.twice else loss
    for retain_graph in [True, False] if recipe.twice else [False]:
        if recipe.direct:
            loss = engine.scale(loss) if recipe.dtype == "fp16" else loss
            loss.backward(retain_graph=retain_graph)
        else:
            engine.backward(loss, retain_graph=retain_graph)


def _evaluate(recipe, engine, micro_batch):
    if not recipe.alone:
        _run_evaluation(recipe, engine, micro_batch)
        return
    with unsharded_parameters(engine):
        if dist.get_rank() == 0:
            _run_evaluation(recipe, engine, micro_batch)


def _run_evaluation(recipe, engine, micro_batch):
    if recipe.evaluates is None:
        return
    if recipe.evaluates == "for a gradient of its output":
        output = micro_batch.call(engine, skips=False)
        torch.autograd.grad(2 * output, output)
        return
    if recipe.evaluates != "in training mode":
        engine.eval()
    mode = {"inference_mode": torch.inference_mode, "with gradients": torch.enable_grad}
    with mode.get(recipe.evaluates, torch.no_grad)():
        micro_batch.call(engine, skips=False)
    engine.train()


# Random recipes ----------------------------------------------------------------------------------------------------


pieces = st.builds(
    Piece,
    # Only blocks that repeat become graphs of their own, so have some in most models.
    kind=st.sampled_from([*KINDS, *["block"] * 6]),
    repeats=st.integers(1, 4),
    like=st.none() | st.integers(0, 3),
    order=st.sampled_from([None, None, *ORDERS]),
    between=st.none() | st.none() | st.none() | st.integers(0, 3),
    compiled=st.sampled_from([True, True, True, False]),
    breaks=st.booleans(),
    checkpointed=st.sampled_from([None, None, False, True]),
    skipped=st.sampled_from([False, False, True]),
    frozen=st.sampled_from([None, None, *FREEZES]),
    hooked=st.sampled_from([None] * 9 + [-1, 0, 1, 2]),
    hooked_alone=st.booleans(),
    changed=st.sampled_from([None, None, None, (0, 2), (1, 3), (2, 3), (1, 2)]),
    changed_backward=st.sampled_from([False, False, True]),
    by_forward=st.sampled_from([False, False, True]),
    reads_part=st.sampled_from([False, False, True]),
)


def _checkpointed(piece, drawn, freezes):
    """What checkpointing computes again must be what the forward has computed.

    Where one of several modules of a class has a full backward hook, torch takes another graph of the code when it
    computes again (github.com/pytorch/pytorch/issues/166926). They may be modules of different pieces.
    """
    hooked = (
        any(layer.changed is not None and layer.changed_backward for layer in drawn) and piece.checkpointed is False
    )
    return None if freezes or hooked or piece.kind in BUFFERED else piece.checkpointed


def _for_sharding(drawn):
    """Changes pieces so that their model may shard parameters. The first one has blocks, to which others come back."""
    first = dataclasses.replace(drawn[0], kind="block", repeats=max(drawn[0].repeats, 2))
    return (
        first,
        *(dataclasses.replace(layer, frozen=None) if layer.kind in CHANGING else layer for layer in drawn[1:]),
    )


@st.composite
def recipes(draw, backends, most=5, sharded=False):
    """Recipes of models of at most so many pieces. ``sharded``: of those that shard parameters, which are few."""
    drawn = draw(st.lists(pieces, min_size=1, max_size=most).map(tuple))
    drawn = _for_sharding(drawn) if sharded else drawn
    # Only modules that repeat are blocks, and something that waits needs blocks.
    has_blocks = any(piece.kind == "block" and piece.repeats > 1 and piece.like is None for piece in drawn)
    dtype = draw(st.sampled_from(["fp32", "fp32", "fp32", "bf16", "fp16"]))
    backend = draw(st.sampled_from(backends))
    regional = sharded or draw(st.sampled_from([None, False, True, True] if has_blocks else [None, False]))
    stage = draw(st.sampled_from([1, 2]))
    changing, offloaded = any(piece.kind in CHANGING for piece in drawn), draw(st.sampled_from([False] * 3 + [True]))
    # With remainders, what a forward changes in a parameter stays.
    remainders = dtype == "bf16" and not (offloaded or changing) and draw(st.booleans())
    # In low precision a plain loop with Adam shows little: rounding of gradients is large beside them.
    adam = remainders or (dtype == "fp32" and draw(st.booleans()))
    eight_bits = adam and not offloaded and draw(st.booleans())
    says = draw(st.sampled_from(["counted", "counted", *(step for step in STEPS if (step, stage) != ("no_sync", 2))]))
    direct = draw(st.booleans())
    # A loss.backward() that leads to no other parameter is no backward of the engine.
    freezes = dtype == "fp32" and not direct and draw(st.sampled_from([False, False, True]))
    drawn = tuple(dataclasses.replace(layer, checkpointed=_checkpointed(layer, drawn, freezes)) for layer in drawn)
    accumulation = draw(st.integers(1, 3))
    each_rank_skips = draw(st.sampled_from([False, True]))
    # A frozen parameter of a block stays as it is: a forward may not scale it down.
    shards = (
        regional is True
        and not any(piece.kind in CHANGING and piece.frozen is not None for piece in drawn)
        and (sharded or draw(st.sampled_from([False, True, True])))
    )
    shards_trained = (
        regional is True
        and not offloaded
        and not any(piece.kind in CHANGING and piece.frozen is not None for piece in drawn)
        and draw(st.sampled_from([False, True, True]) if sharded else st.booleans())
    )
    shards = shards or shards_trained
    # Ranks that share parameters call the same blocks.
    each_rank_skips = each_rank_skips and not shards
    # Reads past a module's call are those of other options' tests where parameters are whole.
    if not shards:
        drawn = tuple(dataclasses.replace(piece, by_forward=False, reads_part=False) for piece in drawn)
    raises = says == "counted" and not each_rank_skips and draw(st.sampled_from([False, False, False, True]))
    moves, tied = draw(st.sampled_from([False, False, False, True])), draw(st.booleans())
    # In ZeRO-2 gradients have left the parameters when a backward ends. A context that has all backwards of a step
    # leaves no moment between them, and low precision is compared loosely.
    drops = [None, None, None, *(DROPS if stage == 1 else ["engine", "optimizer"])]
    drops = drops if says != "coalesce_grad_reduction" else [None]
    can_clip = stage == 1 and accumulation > 1 and says != "coalesce_grad_reduction" and dtype == "fp32"
    return Recipe(
        pieces=drawn,
        width=draw(st.integers(3, 9)),
        tied=tied,
        unused=draw(st.booleans()),
        body_within=draw(st.booleans()),
        stage=stage,
        accumulation=accumulation,
        backend=backend,
        bucket=draw(st.sampled_from([150, 1, 40, 10**6])),
        groups=draw(st.integers(1, 2)),
        clipping=draw(st.sampled_from([0.0, 0.05])),
        # DeepSpeed does not find the master parameters, with which bf16 is compared, where they are sent round.
        round_robin=dtype == "fp32" and draw(st.booleans()),
        overlap_comm=draw(st.booleans()),
        regional=regional,
        overlap_gather=draw(st.sampled_from([None, True, False])) if regional is True and not shards_trained else None,
        reads=None if shards_trained else draw(st.sampled_from([None, None, 0, 1, 2, 5])),
        offloaded=offloaded,
        lengths=draw(st.sampled_from([(4,), (4, 5), (3, 4, 6)])),
        uneven=draw(st.sampled_from([False, False, True])),
        evaluates=draw(st.sampled_from(EVALUATIONS)),
        alone=draw(st.sampled_from([False, False, True])) and not (shards and changing),
        direct=direct,
        losses=draw(st.integers(1, 2)),
        together=draw(st.booleans()),
        # Generated code may go backward once only, and without DeepCompile, beside which low precision is held,
        # DeepSpeed tells of a forward's first backward only.
        twice=backend == "eager" and dtype == "fp32" and draw(st.sampled_from([False, False, True])),
        dtype=dtype,
        says=says,
        # Where the caller says what belongs to a step, one that lost a part raises: test_faults.py. Ranks that differ
        # have sent different gradients when a backward raises on all of them.
        raises=raises,
        each_rank_skips=each_rank_skips,
        drops=draw(st.sampled_from(drops)),
        clips=can_clip and draw(st.booleans()),
        one_pass=adam and draw(st.booleans()),
        chunked_loss=draw(st.booleans()),
        activation_budget=draw(st.sampled_from([None, None, 0.0, 0.2, 0.5, 0.8])),
        adam=adam,
        eight_bits=eight_bits,
        remainders=remainders,
        rests=draw(st.sampled_from([False, False, True])),
        # A loss is scaled in fp16, and low precision is held beside DeepSpeed without DeepCompile, which raises.
        # Where a forward changes parameters, one more forward changes what the penalty is.
        penalized=dtype == "fp32" and not changing and draw(st.sampled_from([False, False, True])),
        freezes=freezes,
        moves=moves,
        changes_parameters=not remainders and draw(st.sampled_from([False, False, False, True])),
        changes_buffers=draw(st.booleans()),
        ignores=draw(st.sampled_from([None, None, "mean", "sum"])),
        loss_scale=draw(st.sampled_from([1.0, 1e-9])) if eight_bits and dtype == "fp32" else 1.0,
        # What raises or moves does so in the backward of the body.
        embedding_frozen=not (tied or raises or moves) and draw(st.booleans()),
        shards=shards,
        shards_trained=shards_trained,
    )


# What makes two trainings agree -----------------------------------------------------------------------------------


def check_precise(run, recipe, results):
    """Asserts that in fp32 the ranks came to what the plain loop did. ``run(train, recipe)`` trains on all ranks."""
    if max(result.error for result in results) >= BOUND and (recipe.backend == "inductor" or recipe.chunked_loss):
        # Generated code and a loss in chunks add up in another order than the plain loop, and norms over few features
        # and long steps enlarge the rounding. A gradient that was lost, or whose memory was used again, makes more
        # than a hundredth.
        assert all(result.error < 100 * BOUND for result in results)
        results = run(train, dataclasses.replace(recipe, backend="eager", chunked_loss=False))
    assert all(result.error < BOUND for result in results)


def check_eight_bits(run, recipe, results):
    """The same with 8-bit states: to their rounding, which is large for small values, so all are taken together."""
    assert all(result.total_error <= 0.05 * result.total_moved for result in results)


def check_rounded(run, recipe, results):
    """The same in low precision, to the rounding that DeepSpeed has without DeepCompile.

    Rounding to 8 bits is large beside a gradient that is small, so all parameters are taken together.
    """
    for result in results:
        if result.total_error <= 0.1 * result.total_moved:
            continue
        # With offload_optimizer DeepSpeed adds up micro-batches in another place, and rounds otherwise. After several
        # forwards it does not notice each loss.backward(), but each engine.backward().
        alike = dataclasses.replace(recipe, offloaded=False, direct=False)
        if recipe.evaluates == "for a gradient of its output":
            # DeepSpeed without DeepCompile raises there before the first backward.
            alike = dataclasses.replace(alike, evaluates=None)
        # Where ranks skip different pieces, DeepSpeed without DeepCompile may reduce gradients of different sizes. In
        # ZeRO-2 it raises where a module in two reentrant checkpoints gets two gradients in one backward.
        can_compare = not (recipe.each_rank_skips or _gives_gradients_twice(recipe))
        rounding = (
            max(outcome.total_error for outcome in run(train, alike, deepcompile=False)) if can_compare else math.inf
        )
        if rounding < 0.5 * result.total_moved:
            assert result.total_error < 1.5 * rounding
        else:
            # Rounding hides everything, so the model is trained without it.
            precise = dataclasses.replace(recipe, dtype="fp32", remainders=False, eight_bits=False)
            check_precise(run, precise, run(train, precise))


def _gives_gradients_twice(recipe):
    calls_again = any(piece.order or piece.like is not None or piece.between is not None for piece in recipe.pieces)
    return recipe.stage == 2 and calls_again and any(piece.checkpointed for piece in recipe.pieces)


def check_remainders(run, recipe, results):
    """Beside that, master weights have the bits of those in fp32.

    At a tie a parameter may be another, and so gradients from then on.
    """
    check_rounded(run, recipe, results)
    if not any(result.ties for result in results):
        for result, whole in zip(results, run(train_with_masters, recipe), strict=True):
            assert all(map(torch.equal, result.masters, whole.masters))


def check_of(recipe):
    if recipe.remainders:
        return check_remainders
    if recipe.dtype != "fp32":
        return check_rounded
    return check_eight_bits if recipe.eight_bits else check_precise


def for_each(strategy, number, first_seed, check, phases=(Phase.generate,)):
    """Calls ``check(recipe)`` for ``number`` recipes."""

    @seed(first_seed)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(recipe=strategy)
    def holds(recipe):
        check(recipe)

    holds()


def try_models(ranks, world, strategy, number, first_seed, count):
    """Trains ``number`` models on so many ranks. Counts how many were tried, and how many have agreed."""

    def trains_as_a_plain_loop(recipe):
        count["tried"] += 1
        results = ranks(world).run(train, recipe)
        for result in results:
            assert result.moved > 1e-4
            assert set(result.held) == {0}
        check_of(recipe)(ranks(world).run, recipe, results)
        count["agreed"] += 1

    for_each(strategy, number, first_seed, trains_as_a_plain_loop, (Phase.generate, Phase.shrink))


def made_small(recipe):
    """What takes long is to compile for other lengths, and a graph for each of the modules that break theirs."""
    pieces = tuple(dataclasses.replace(piece, repeats=min(piece.repeats, 2)) for piece in recipe.pieces)
    return dataclasses.replace(recipe, pieces=pieces, lengths=(4,), steps=2)


def test_every_trick_is_drawn():
    """Conditions that contradict each other would leave a trick out of all random models."""
    drawn = collections.defaultdict(set)

    def draw(recipe):
        for part in (recipe, *recipe.pieces):
            for name, value in vars(part).items():
                drawn[type(part), name].add(value)

    for_each(recipes(["eager", "inductor"]) | recipes(["eager"], sharded=True), 400, 1, draw)
    assert drawn[Piece, "kind"] == {*KINDS}
    assert [name for (_, name), values in drawn.items() if len(values) < 2] == ["steps"]


@vary("first_seed", [1, 2])
def test_small_random_models(ranks, first_seed):
    """Options that no other test combines would change what a model of one piece learns."""
    count = collections.Counter()
    # The first model is the smallest that there is. Two ranks would compile each graph twice.
    try_models(ranks, 1, recipes(["eager"], most=1).map(made_small), 2, first_seed, count)
    assert count["agreed"] == count["tried"] > 0


@vary("again", [{"drops": "engine"}, {"raises": True}])
def test_a_dropped_forward_changes_parameters_until_the_step(ranks, again):
    """A parameter that is read before the module that clamps it would have another value than in a plain loop."""
    pieces = (Piece("clamped", reads_part=True), Piece("block", repeats=2))
    recipe = Recipe(pieces, regional=True, shards=True, shards_trained=True, changes_parameters=True, steps=2, **again)
    # On a single rank nothing is sharded.
    check_precise(ranks(2).run, recipe, ranks(2).run(train, recipe))


@pytest.mark.slow
def test_a_frame_that_is_compiled_often(ranks):
    """The rank would go on without compiled code, where a checkpoint behind a frozen embedding trains nothing."""
    pieces = (
        Piece("unseen", repeats=2, checkpointed=True, skipped=True, frozen="most", changed=(2, 3)),
        Piece(like=0, breaks=True),
        Piece("positions", repeats=2, skipped=True),
        Piece("shifting", repeats=3, order="reversed", between=2, breaks=True, frozen="most"),
    )
    recipe = Recipe(pieces, width=7, accumulation=2, regional=False, lengths=(4, 5), embedding_frozen=True)
    recipe = dataclasses.replace(recipe, each_rank_skips=True, bucket=10**6)
    check_precise(ranks(1).run, recipe, ranks(1).run(train, recipe))


def test_whole_parameters_train_in_the_graphs_of_sharded_ones(ranks):
    """A tied embedding that uncompiled code calls would give other bits, though neither side is wrong."""
    recipe = Recipe((Piece("block", repeats=2, breaks=True),), tied=True, bucket=10**6, losses=2, together=True)
    sharding = {"regional": True, "shards": True, "shards_trained": True}
    recipe = dataclasses.replace(recipe, stage=2, dtype="fp16", steps=1, **sharding)
    sharded, whole = (ranks(2).run(function, recipe) for function in (train, train_whole))
    assert [one.sums for one in sharded] == [other.sums for other in whole]


@pytest.mark.slow
def test_random_models(ranks, request, capsys):
    models, first_seed = request.config.getoption("--models"), request.config.getoption("--seed")
    world, asked = request.config.getoption("--world"), models is not None
    # Generated code is slow to make, above all for a CPU, so only longer runs have some.
    backends = ["eager"] * (1 if torch.cuda.is_available() else 9) + ["inductor"] if asked else ["eager"]
    count = collections.Counter()
    try:
        try_models(ranks, world, recipes(backends), models or 8, first_seed, count)
    finally:
        with capsys.disabled():
            if asked:
                agreed, tried = count["agreed"], count["tried"]
                print(f"\nseed {first_seed}, {world} ranks: {agreed} of {tried} models agreed with a plain loop")


@pytest.mark.slow
def test_random_models_sharded(ranks, request, capsys):
    """A model whose parameters are sharded would come to other bits."""
    number, first_seed = request.config.getoption("--models") or 3, request.config.getoption("--seed")
    count = collections.Counter()

    def come_to_the_same_bits(recipe):
        sharded, whole = (ranks(2).run(function, recipe) for function in (train, train_whole))
        assert [str(one.sums) for one in sharded] == [str(other.sums) for other in whole]
        count["agreed"] += 1

    for_each(recipes(["eager"], sharded=True), number, first_seed, come_to_the_same_bits)
    with capsys.disabled():
        print(f"\nseed {first_seed}: {count['agreed']} models came to the same bits")
