# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Forwards of sharded models on streams of the caller's. Only on GPUs there are streams."""

import functools

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.shard_parameters.feature import sharded_blocks

from support.frozen import MODELS, beside_whole
from support.ids import vary
from support.on_ranks import on_ranks
from support.sharded import WHOLE, engine_of, same, section
from support.training import batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU has no streams"),
]
# Of the device's clock: about a second, in which the host runs ahead.
CYCLES = 2 * 10**9


def make_engine_of(trained, _, config, **case):
    module, engine = engine_of(MODELS["non-reentrant"], config, trained, **case)
    assert config is WHOLE or sharded_blocks(engine).units
    return module, engine


def hold_up(_):
    """Keeps the stream of the backward's caller busy before the backward ends there."""
    torch.autograd.Variable._execution_engine.queue_callback(lambda: torch.cuda._sleep(CYCLES))


def forwards_in_a_side_stream(engine, module, folder):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for micro_step in range(6):
        with torch.cuda.stream(side):
            loss = engine(batch(micro_step, 0, dist.get_rank(), 4))
        loss.register_hook(hold_up)
        engine.backward(loss)
        steps = engine.is_gradient_accumulation_boundary()
        engine.step()
        if steps:
            # As in any program. The forward of a later micro-batch need not wait for anything.
            side.wait_stream(torch.cuda.current_stream())


@vary("shards", ["all", "frozen"])
@on_ranks(2)
def test_forwards_in_a_side_stream(shards):
    """The end of a backward would copy this rank's part out of memory that another unit has got on the side stream."""
    make = functools.partial(make_engine_of, "adapters" if shards == "frozen" else "all")
    configs = section(shards), WHOLE
    assert same(*beside_whole(make, configs, forwards_in_a_side_stream, "", accumulation=2))
