# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Embeddings and heads that are sharded train to the same bits as whole ones, however a model reads them."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.compile.features.shard_parameters import feature, keep, unit

from support.chunked_loss import small_chunks
from support.frozen import WIDTH, Adapted, AdaptedBlock, Body, Tied, late, model_of
from support.graph_cache import shapes_no_graph
from support.ids import vary
from support.models import VOCABULARY
from support.on_ranks import gathered, on_ranks
from support.sharded import end, engine_of, losses_of, same, section, units_at_rest
from support.training import Case, batch, device, make_engine


class TiedHead(Adapted):
    def __init__(self):
        super().__init__()
        self.head.weight = self.body.embedding.weight


class ReadAsTensor(TiedHead):
    """Compiled code reads the embedding of the module that calls the blocks, and calls no module for it."""

    def __init__(self):
        super().__init__()
        del self.head

    def forward(self, ids, skip=False):
        return F.cross_entropy(F.linear(self.body(ids), self.body.embedding.weight).flatten(0, 1), ids.flatten())


class Table(nn.Module):
    """An embedding of its own kind."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, ids):
        return self.weight[ids]


class TakesEmbedded(Body):
    def forward(self, x, skip=False):
        return self.run(x, skip)


class EmbedsOutside(Adapted):
    """Compiled code calls the embedding, which belongs to the module that calls the blocks."""

    of_body = TakesEmbedded

    def embedded(self, ids):
        return self.body.embedding(ids)

    def forward(self, ids, skip=False):
        return F.cross_entropy(self.head(self.body(self.embedded(ids))).flatten(0, 1), ids.flatten())


class ReadBefore(EmbedsOutside):
    """Compiled code looks up, before blocks run, what nobody knows to be an embedding."""

    def __init__(self):
        super().__init__()
        self.body.embedding = Table()

    def embedded(self, ids):
        return self.body.embedding(ids) * 2 + self.head.weight.sum()


class CallsAll(Body):
    """One module has all, and calls blocks."""

    def forward(self, ids, skip=False):
        x = super().forward(ids, skip)
        return F.cross_entropy(F.linear(x, self.embedding.weight).flatten(0, 1), ids.flatten())


class TwoStacks(Adapted):
    """Two modules call blocks. Code between them reads the embedding, and code behind them the head, twice."""

    def __init__(self):
        super().__init__()
        self.other = TakesEmbedded()
        del self.other.embedding

    def forward(self, ids, skip=False):
        x = self.body(ids)
        x = self.other(x + self.body.embedding(ids.flip(0))) + self.head(x).mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Uncompiled(Adapted):
    """Code that is not compiled reads parameters of its own, which autograd saves as they are."""

    def __init__(self):
        super().__init__()
        del self.head
        self.table = nn.Parameter(torch.randn(WIDTH, VOCABULARY) / 4)

    @torch.compiler.disable
    def logits(self, x):
        return x @ self.table + (self.table * self.table).mean()

    def forward(self, ids, skip=False):
        return F.cross_entropy(self.logits(self.body(ids, skip)).flatten(0, 1), ids.flatten())


OUTSIDE = {
    "plain": Adapted,
    "tied": TiedHead,
    "reentrant": model_of(run_block=lambda self, block, x: checkpoint(block, x, use_reentrant=True)),
    "non-reentrant": model_of(run_block=lambda self, block, x: checkpoint(block, x, use_reentrant=False)),
    "read as a tensor": ReadAsTensor,
    "embeds outside": EmbedsOutside,
    "read before": ReadBefore,
    "calls all": CallsAll,
    "two stacks": TwoStacks,
    "tied to blocks": Tied,
    "uncompiled": Uncompiled,
}


def train(model, shards, forwards=1, frozen=False, steps=2, chunked=False, direct=False, kept=None, **case):
    def build():
        module = OUTSIDE[model]().requires_grad_(True)
        getattr(module, "body", module).embedding.requires_grad_(not frozen)
        return module

    made = section(shards, chunked_loss=chunked, **({"keep_gathered": kept} if shards else {}))
    module, engine = engine_of(build, made, "adapters", **case)
    rank, results = dist.get_rank(), []

    def forward(step, micro_step):
        losses = [engine(batch(step, micro_step, rank + index, 4)) for index in range(forwards)]
        with torch.no_grad():
            results.append(module(batch(step, 7, rank, 4)) if direct else engine(batch(step, 7, rank, 4)))
        if direct:
            results.append(getattr(module, "body", module).embedding(batch(step, 8, rank, 4)).detach())
        return sum(losses)

    results += losses_of(engine, steps, forward)
    at_rest = units_at_rest(engine)
    return [*results, *end(engine, module)], at_rest


@pytest.mark.options("compile.shard_parameters")
@vary("model", OUTSIDE)
@vary(
    "case",
    [{}],
    slow=[
        {"chunked": True, "kept": 3, "stage": 2},
        {"stage": 2, "dtype": "bf16", "delay": 0.01},
        {"forwards": 2, "direct": True, "accumulation": 2},
        {"frozen": True, "kept": 1},
        {"kept": 2, "forwards": 2, "delay": 0.01},
        {"backend": "inductor"},
    ],
)
@on_ranks(2)
def test_it_trains_to_the_same_bits(model, case):
    """Code around blocks that reads an embedding or a head before it has come, or after it was given back."""
    with small_chunks() if case.get("chunked") else contextlib.nullcontext() as seen:
        with late(case.pop("delay", None)):
            results, at_rest = train(model, "all", **case)
        expected, _ = train(model, None, **case)
    # Where the model itself calls blocks, or code behind them is not compiled, its loss is no part of a graph.
    assert not case.get("chunked") or model in ("calls all", "uncompiled") or seen.chunks
    assert same(results, expected) and at_rest >= 4


@contextlib.contextmanager
def gathers_seen(see):
    """Calls ``see(unit)`` whenever a unit's gather begins."""
    send = unit.Unit._send

    @shapes_no_graph
    def sending(self, *args, **kwargs):
        see(self)
        send(self, *args, **kwargs)

    with mock.patch.object(unit.Unit, "_send", sending):
        yield


def sent(model, kept):
    """Returns how many units were gathered in a step, how many of these were whole when the loss was there, and how
    many are when blocks have been called by themselves, each in a pass of its own.
    """
    module = OUTSIDE[model]().to(device()).requires_grad_(True)
    engine, begun, whole = make_engine(module, Case(config=section("all", keep_gathered=kept))), [], []
    units = feature.sharded_blocks(engine).units
    with gathers_seen(begun.append):
        for step in range(2):
            begun.clear()
            loss = engine(batch(step, 0, dist.get_rank(), 4))
            whole = [unit.memory.name for unit in units if unit.is_gathered]
            engine.backward(loss)
            engine.step()
        sends, x = len(begun), torch.ones(1, 3, WIDTH, device=device())
        for block in module.body.blocks:
            x = block(x)
        alone = sum(unit.is_gathered for unit in units)
    engine.destroy()
    return sends, len(whole), alone


@pytest.mark.options("compile.keep_gathered")
@vary("model", ["plain"], slow=["non-reentrant"])
@vary(
    "kept, sends, whole",
    [(3, 7, 4)],
    slow=[(None, 10, 1), (0, 10, 1), (1, 9, 2), (4, 6, 5), (9, 6, 5), ("fit", 10, 1)],
)
@on_ranks(2)
def test_what_a_step_gathers(model, kept, sends, whole):
    """Blocks that are kept would be gathered again, or others kept; an embedding or a head would be gathered twice."""
    # From the third step on a GPU has memory to spare, and keeps all blocks.
    alone = 5 if kept == "fit" and device().type != "cpu" else whole
    assert sent(model, kept) == (sends, whole, alone)


@on_ranks(2)
def test_the_last_block_stays_on_many_ranks():
    """There the backward would wait for it, which nothing hides."""
    with mock.patch.object(keep, "KEEP_LAST_FROM", 2):
        assert sent("plain", None) == (9, 2, 2)


def train_beside_dropped(shards):
    """Trains where a forward that skips blocks, alike on all ranks, has no backward before the step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, rank, losses = Adapted().to(device()).requires_grad_(True), dist.get_rank(), []
    engine = make_engine(module, Case(config=section(shards, **({"keep_gathered": 4} if shards else {})), adam=True))
    for step in range(3):
        engine.backward(engine(batch(step, 0, rank, 4)))
        engine(batch(step, 1, rank, 4), True)
        engine.step()
        losses.append(engine(batch(step, 2, rank, 4)).detach())
    end(engine)
    return losses


@on_ranks(2)
def test_what_is_kept_is_of_the_last_step():
    """A block that is kept, and that a forward has skipped, would come with the values from before a step."""
    assert same(train_beside_dropped("all"), train_beside_dropped(None))


@vary(
    "overflows, dtype, kept",
    [([False, False, False], "fp32", [0, 1, 1]), ([True, False, True, False], "fp16", [0, 0, 0, 1])],
    expects="overflows, kept",
)
@on_ranks(2)
def test_fit_keeps_as_many_on_every_rank(overflows, dtype, kept):
    """Ranks that keep what fits on each of them would gather different blocks. The first has room for one alone.

    Where the first steps overflow, the memory would count as free that the optimizer's states need later.
    """
    module, rank = Adapted().to(device()).requires_grad_(True), dist.get_rank()
    engine = make_engine(module, Case(config=section("all", keep_gathered="fit"), dtype=dtype))
    sharded, numbers = feature.sharded_blocks(engine), []
    room = 10**9 if rank else list(sharded._unit_of.values())[-1].memory.nbytes
    with mock.patch.object(keep, "spare_memory", shapes_no_graph(lambda device: room)):
        for step, is_left_out in enumerate(overflows):
            engine.backward(engine(batch(step, 0, rank, 4)) * (float("inf") if is_left_out else 1.0))
            engine.step()
            numbers.append(sharded.whole.most_kept)
    engine.destroy()
    assert numbers == kept and engine.skipped_steps == sum(overflows)


class Large(Adapted):
    """Its embedding and its head are larger than its blocks. Only its norm, which is small, stays whole."""

    def __init__(self):
        super().__init__()
        self.body.embedding, self.head = nn.Embedding(500, WIDTH), nn.Linear(WIDTH, 500, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids, skip=False):
        return F.cross_entropy(self.head(self.norm(self.body(ids))).flatten(0, 1), ids.flatten())


@pytest.mark.options("compile.shard_parameters", "compile.keep_gathered")
@vary("kept", [0], slow=[2])
@vary("checkpoints", [False], slow=[True])
@on_ranks(2)
def test_when_memory_is_given_back(kept, checkpoints):
    """An embedding that is not freed after the lookup, or a head after its backward, would be most of the peak."""
    module = Large().to(device()).requires_grad_(True)
    if checkpoints:
        run = module.body.run_block
        module.body.run_block = lambda block, x: checkpoint(run, block, x, use_reentrant=False)
    engine = make_engine(module, Case(config=section("all", keep_gathered=kept), adam=True))
    sharded, held = feature.sharded_blocks(engine), {}

    def note(moment):
        held[moment] = sum(unit.memory.buffer.untyped_storage().nbytes() for unit in sharded.units)

    note("at rest")
    for index, block in enumerate(module.body.blocks):

        def ends(block, inputs, output, index=index):
            if output.requires_grad and torch._C._current_graph_task_id() == -1:
                note(f"forward {index}")
                output.register_hook(lambda gradient: note(f"backward {index}"))

        block.register_forward_hook(ends)
    loss = engine(batch(0, 0, dist.get_rank(), 4))
    note("loss")
    engine.backward(loss)
    note("backward")
    engine.step()
    note("step")
    with torch.no_grad():
        engine(batch(0, 0, dist.get_rank(), 4))
    note("evaluated")
    sizes, outside = {unit.memory.name: unit.memory.nbytes for unit in sharded.units}, sharded.outside.memory.nbytes
    engine.destroy()
    head, embedding = sizes.pop("head.weight"), sizes.pop("body.embedding.weight")
    block = max(sizes.values())
    assert outside < block < 500 * WIDTH * 4 <= head + embedding + 128
    assert held["at rest"] == held["backward"] == held["step"] == held["evaluated"] == 0
    # A block makes room when the next one but one is begun, and kept ones are begun beside it.
    assert all(held[f"forward {index}"] <= max(2, 1 + kept) * block for index in range(3))
    assert held["forward 3"] <= head + (1 + kept) * block
    assert head <= held["loss"] <= head + kept * block
    assert held["backward 3"] <= head + max(kept, 1) * block
    assert all(held[f"backward {index}"] <= 2 * block for index in range(3))


class StacksOfOne(Large):
    """Two modules call one block each. Two large embeddings are read before the first one."""

    of_body = TakesEmbedded

    def __init__(self):
        super().__init__()
        self.other, self.positions = TakesEmbedded(), nn.Embedding(500, WIDTH)
        del self.other.embedding
        self.body.blocks, self.other.blocks = self.body.blocks[:1], self.other.blocks[:1]

    def forward(self, ids, skip=False):
        x = self.other(self.body(self.body.embedding(ids) + self.positions(ids)))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


@on_ranks(2)
def test_a_module_that_calls_one_block():
    """All large embeddings would stay beside the block, as for a block that somebody calls by itself."""
    module = StacksOfOne().to(device()).requires_grad_(True)
    blocks = [AdaptedBlock.__name__]
    engine = make_engine(module, Case(config=section("all", regional_compilation=blocks)))
    sharded, counts = feature.sharded_blocks(engine), []

    def see(unit):
        if unit in sharded._unit_of.values():
            counts.append(len(sharded.whole._is_kept))

    with gathers_seen(see), torch.no_grad():
        engine(batch(0, 0, 0, 4))
    engine.destroy()
    # How many units are whole, or on their way, when each block's unit begins.
    assert counts == [2, 2]


class Attends(Body):
    """Attends behind the first block, which reads two large parameters together."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.attention = nn.MultiheadAttention(WIDTH, 1, bias=False, batch_first=True)

    def forward(self, ids, skip=False):
        x = self.embedding(ids)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if not index:
                x = x + self.attention(x, x, x, need_weights=False)[0]
        return x


class WithAttention(Adapted):
    of_body = Attends


@on_ranks(2)
def test_a_layer_that_reads_two_large_parameters():
    """With a place among blocks, it would have blocks take the place of the first one before it is read."""
    module = WithAttention().to(device()).requires_grad_(True)
    engine, names = make_engine(module, Case(config=section("all"))), []
    with gathers_seen(lambda unit: names.append(unit.memory.name)), torch.no_grad():
        engine(batch(0, 0, dist.get_rank(), 4))
    engine.destroy()
    assert gathered(names) == [names] * 2 and sum("attention" in name for name in names) == 2
    # The next block was on its way, and gave its place to them.
    assert len(names) == len({*names}) + 1


@on_ranks(2)
def test_tied_parameters_are_cloned_under_each_name():
    """A trainer that leaves out names which share memory would save a model without its head."""
    module = TiedHead().to(device()).requires_grad_(True)
    engine = make_engine(module, Case(config=section("all"), adam=True))
    engine.backward(engine(batch(0, 0, 0, 4)))
    engine.step()
    clones = clone_tensors_for_torch_save(module.state_dict())
    engine.destroy()
    memory = {clone.untyped_storage()._cdata for clone in clones.values()}
    # The first rank saves.
    assert dist.get_rank() > 0 or "head.weight" in clones and len(memory) == len(clones)
