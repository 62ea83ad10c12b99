# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Forwards that read, or change, sharded parameters of blocks elsewhere than in calls of these blocks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.frozen import WIDTH, Adapted, AdaptedBlock, Body, late, model_of
from support.ids import vary
from support.models import VOCABULARY
from support.on_ranks import on_ranks
from support.parameter_gather import one_rank_late
from support.sharded import end, engine_of, losses_of, same, section, units_at_rest
from support.training import Case, batch, device, make_engine


class RegisteredTwice(Adapted):
    """One module object is registered in a block and outside, where compiled code calls it."""

    def __init__(self):
        super().__init__()
        self.norm = self.body.blocks[1].norm

    def forward(self, ids, skip=False):
        return F.cross_entropy(self.head(self.norm(self.body(ids))).flatten(0, 1), ids.flatten())


class Halving(Body):
    """It halves weights when it goes to evaluation, and doubles them when it goes back, as RWKV does."""

    are_halved = False

    def forward(self, ids, skip=False):
        if self.are_halved == self.training:
            with torch.no_grad():
                for index, block in enumerate(self.blocks):
                    for layer in (block.up, block.down):
                        if self.training:
                            layer.weight.mul_(2**index)
                        else:
                            layer.weight.div_(2**index)
            self.are_halved = not self.training
        return super().forward(ids, skip)


class ReadByCompiledCode(Adapted):
    """Compiled code reads parameters of blocks before the blocks run, and behind them."""

    def forward(self, ids, skip=False):
        first, *_, last = self.body.blocks
        x = self.body(ids) * first.norm.weight + first.norm(last.down.weight.mean(1))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class ReadByOtherBlock(AdaptedBlock):
    """A block reads the parameters of another one, which is no submodule of it."""

    other = ()

    def forward(self, x):
        for block in self.other:
            x = x * block.norm.weight
        return super().forward(x)


class KnowsOther(Body):
    of_block = ReadByOtherBlock

    def __init__(self):
        super().__init__()
        self.blocks[1].other, self.blocks[2].other = (self.blocks[3],), (self.blocks[0],)


class ReadUncompiled(Adapted):
    """Code of the model that is not compiled reads parameters of all blocks, several in one call."""

    @torch.compiler.disable
    def penalty(self):
        weights = [parameter for block in self.body.blocks for parameter in block.parameters()]
        return sum(torch._foreach_norm(weights)) + torch.cat([weight.flatten() for weight in weights]).square().mean()

    def forward(self, ids, skip=False):
        return super().forward(ids, skip) + self.penalty()


class ByMethod(Adapted):
    """A method other than ``forward()`` is called, and the model itself holds a large parameter that it reads."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, VOCABULARY) / 4)

    def encode(self, ids):
        x = self.body(ids) @ self.table
        return F.cross_entropy((x + (self.table * self.table).mean()).flatten(0, 1), ids.flatten())


READING = {
    "registered twice": RegisteredTwice,
    "by forward()": model_of(run_block=lambda self, block, x: block.forward(x)),
    "by forward(), checkpointed": model_of(
        run_block=lambda self, block, x: checkpoint(block.forward, x, use_reentrant=False)
    ),
    "a part before": model_of(run=lambda self, x, skip: Body.run(self, self.blocks[0].norm(x), skip)),
    "a part behind": model_of(run=lambda self, x, skip: self.blocks[1].norm(Body.run(self, x, skip))),
    "halving": type("Adapted", (Adapted,), {"of_body": Halving}),
    "by compiled code": ReadByCompiledCode,
    "by another block": type("Adapted", (Adapted,), {"of_body": KnowsOther}),
    "uncompiled": ReadUncompiled,
    "by a method": ByMethod,
}


def train(model, shards, forwards=1, **case):
    """Returns what training and evaluation come to, and how often torch compiled code after the second step."""
    trained = "all" if shards[0] == "all" else "adapters"
    module, engine = engine_of(READING[model], section(shards[0] if shards[1] else None), trained, **case)
    call, rank, compiled = getattr(module, "encode", engine), dist.get_rank(), []

    def forward(step, micro_step):
        return sum(call(batch(step, micro_step, rank + index, 4)) for index in range(forwards))

    def evaluate(step):
        result = call(batch(step, 7, rank, 4))
        compiled.append(sum(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values()))
        return result

    results = losses_of(engine, 4, forward, evaluate)
    at_rest = units_at_rest(engine)
    return [*results, *end(engine, module)], at_rest, compiled[-1] - compiled[1]


@pytest.mark.options("compile.shard_parameters")
@vary("model", READING)
@vary("shards", ["all", "frozen"])
@vary(
    "case", [{}], slow=[{"stage": 2, "dtype": "bf16", "delay": 0.01}, {"forwards": 2, "accumulation": 2, "stage": 2}]
)
@on_ranks(2)
def test_forwards_that_read_elsewhere(model, shards, case):
    """A read of a parameter that nothing has gathered would end the program, or compile code anew in each step."""
    with late(case.pop("delay", None)):
        results, at_rest, compiled = train(model, (shards, True), **case)
    expected, _, _ = train(model, (shards, False), **case)
    assert same(results, expected) and compiled == 0
    assert at_rest >= (0 if model == "by another block" else 1)


def train_rwkv(**options):
    from transformers import RwkvConfig, RwkvForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "context_length": 8, "hidden_size": 8, "num_hidden_layers": 3}
    model = RwkvForCausalLM(RwkvConfig(**sizes, rescale_every=1)).to(device())
    engine = make_engine(model, Case(config=section(None, **options), adam=True))
    results = []
    with one_rank_late(0.1):
        for step in range(3):
            ids = batch(step, 0, dist.get_rank(), 4)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            engine.eval()
            with torch.no_grad():
                results += [loss.detach(), engine(input_ids=ids).logits]
            engine.train()
    return [*results, *end(engine, model)]


@pytest.mark.slow
@on_ranks(2)
def test_rwkv_halves_weights_in_evaluation():
    """What it halves before its blocks run would be on its way to this rank, and overwritten, or at rest."""
    pytest.importorskip("transformers")
    expected = train_rwkv(overlap_param_gather=False)
    for options in ({}, {"shard_parameters": "all"}):
        assert same(train_rwkv(**options), expected), options
