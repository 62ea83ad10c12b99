# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ranks with sharded parameters call the same blocks, or raise before one waits for another."""

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.shard_parameters.comparison import DIFFERENT, LONGEST_NAME

from support.frozen import Body, TrainedHead
from support.ids import vary
from support.on_ranks import on_ranks
from support.options import outcome
from support.sharded import end, engine_of, losses_of, same, section
from support.training import batch

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


@pytest.mark.options("compile.shard_parameters")
@pytest.mark.skipif(torch.cuda.is_available(), reason="an assertion on the device ends the processes")
@vary("blocks", [*LEFT_OUT])
@vary("shards, evaluates", [("all", False), ("frozen", True)], slow=[("frozen", False)])
# The process group would wait for half an hour.
@on_ranks(2, timeout=100)
def test_a_rank_that_leaves_blocks_out(blocks, shards, evaluates):
    """Ranks would wait for each other to the time-out, and nobody would know which block to call."""
    _, engine = make(blocks, without, shards)
    ids, skips = batch(0, 0, dist.get_rank(), 4), dist.get_rank() == 1
    if evaluates:
        with torch.no_grad():
            said = outcome(engine, ids, skips)
    else:
        said = outcome(lambda: engine.backward(engine(ids, skips)))
    assert said == f"DistBackendError: {DIFFERENT.format(LEFT_OUT[blocks][0 if skips else 1])}"


def compare(blocks, instead, each_rank):
    """Sharded parameters train to the same bits where one rank, or all, leave blocks out in turn."""
    results = []
    for shards in ("all", "frozen", None):
        model, engine = make(blocks, instead, shards)

        def forward(step, micro_step, engine=engine):
            skips = (step + dist.get_rank() * each_rank) % 2 == 1
            return engine(batch(step, 0, dist.get_rank(), 4), skips)

        results.append([*losses_of(engine, forward=forward), *end(engine, model)])
    of_all, of_frozen, whole = results
    assert same(of_all, whole) and same(of_frozen, whole)


@pytest.mark.options("compile.shard_parameters")
@vary("blocks", [*LEFT_OUT])
@on_ranks(2)
def test_blocks_that_all_ranks_leave_out(blocks):
    """A backward would gather a block that no rank has called, or read the next one before it has come."""
    compare(blocks, without, False)


@pytest.mark.follows("(if need be on zeros, and multiply the output by 0), or use unsharded_parameters(engine)")
@on_ranks(2)
def test_a_block_on_zeros():
    """Who does as the error says would meet it again, or train otherwise."""
    compare((1, 3), on_zeros, True)


@pytest.mark.quick
def test_a_gpu_can_say_why_ranks_differ():
    """An assertion on a CUDA device refuses a message of 255 bytes or more, in every run, also of ranks alike."""
    assert len(DIFFERENT.format("x" * LONGEST_NAME).encode()) < 255
