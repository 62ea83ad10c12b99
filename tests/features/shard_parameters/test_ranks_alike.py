# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ranks with sharded parameters call the same blocks, or raise before one waits for another."""

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.shard_parameters.comparison import DIFFERENT, LONGEST_NAME

from support.frozen import Body, TrainedHead
from support.ids import vary
from support.options import outcome
from support.sharded import end, engine_of, losses_of, same, section
from support.training import batch

SLOW = pytest.mark.slow
DEPTH = 4
# Blocks that a rank leaves out -> where it is, and where others are, when ranks compare.
LEFT_OUT = {
    (1,): ("block body.blocks.2", "block body.blocks.1"),
    (0,): ("block body.blocks.1", "block body.blocks.0"),
    (DEPTH - 1,): ("block body.blocks.2", "block body.blocks.3"),
    (2, 3): ("block body.blocks.1", "block body.blocks.2"),
    (0, 1, 2, 3): ("no block", "block body.blocks.0"),
}


def without(block, x):
    """Leaves a block out."""
    return x


def on_zeros(block, x):
    """Calls a block that has nothing to do here, as the error advises."""
    return x + 0 * block(torch.zeros_like(x))


def make(blocks, instead, shards):
    """Makes a model, trained but for its embedding. With ``skip``, it calls ``instead`` in place of these blocks."""

    def run(self, x, skip):
        for index, block in enumerate(self.blocks):
            x = instead(block, x) if skip and index in blocks else block(x)
        return x

    build = type("Model", (TrainedHead,), {"of_body": type("Body", (Body,), {"run": run})})
    return engine_of(build, section(shards), "adapters", stage=2)


def left_out_by_one(blocks, shards, evaluates):
    """The last rank leaves blocks out. Returns what is said."""
    _, engine = make(blocks, without, shards)
    ids, skips = batch(0, 0, dist.get_rank(), 4), dist.get_rank() == dist.get_world_size() - 1
    if evaluates:
        with torch.no_grad():
            return outcome(engine, ids, skips)
    return outcome(lambda: engine.backward(engine(ids, skips)))


@pytest.mark.options("compile.shard_parameters")
@pytest.mark.skipif(torch.cuda.is_available(), reason="an assertion on the device ends the processes")
@vary("blocks", [*LEFT_OUT])
@vary("shards, evaluates", [("all", False), pytest.param("frozen", False, marks=SLOW), ("frozen", True)])
def test_a_rank_that_leaves_blocks_out(ranks, blocks, shards, evaluates):
    """Ranks would wait for each other to the time-out, and nobody would know which block to call."""
    # The process group would wait for half an hour.
    *others, last = ranks(2).run(left_out_by_one, blocks, shards, evaluates, timeout=100)
    for said, at in zip((last, *others), LEFT_OUT[blocks], strict=True):
        assert said == f"DistBackendError: {DIFFERENT.format(at)}"


def compare(blocks, instead, each_rank):
    """Whether sharded parameters train to the same bits where one rank, or all, leave blocks out in turn."""
    results = []
    for shards in ("all", "frozen", None):
        model, engine = make(blocks, instead, shards)

        def forward(step, micro_step, engine=engine):
            skips = (step + dist.get_rank() * each_rank) % 2 == 1
            return engine(batch(step, 0, dist.get_rank(), 4), skips)

        results.append([*losses_of(engine, forward=forward), *end(engine, model)])
    return [same(found, results[-1]) for found in results]


@pytest.mark.options("compile.shard_parameters")
@vary("blocks", [*LEFT_OUT])
def test_blocks_that_all_ranks_leave_out(ranks, blocks):
    """A backward would gather a block that no rank has called, or read the next one before it has come."""
    assert ranks(2).run(compare, blocks, without, False) == [[True] * 3] * 2


@pytest.mark.follows("(if need be on zeros, and multiply the output by 0), or use unsharded_parameters(engine)")
def test_a_block_on_zeros(ranks):
    """Who does as the error says would meet it again, or train otherwise."""
    assert ranks(2).run(compare, (1, 3), on_zeros, True) == [[True] * 3] * 2


@pytest.mark.quick
def test_a_gpu_can_say_why_ranks_differ():
    """An assertion on a CUDA device refuses a message of 255 bytes or more, in every run, also of ranks alike."""
    assert len(DIFFERENT.format("x" * LONGEST_NAME).encode()) < 255
