# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Forwards of sharded models on streams of the caller's. Only on GPUs there are streams."""

import pytest
import torch
import torch.distributed as dist

from support.frozen import MODELS, beside_whole
from support.on_ranks import on_ranks
from support.sharded import WHOLE, engine_of, same, section
from support.training import batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU has no streams"),
]
# Of the device's clock: about a second, in which the host runs ahead.
CYCLES = 2 * 10**9


def make(_, config, **case):
    return engine_of(MODELS["non-reentrant"], config, **case)


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


@on_ranks(2)
def test_forwards_in_a_side_stream():
    """The end of a backward would copy this rank's part out of memory that another unit has got on the side stream."""
    configs = section("frozen"), WHOLE
    assert same(*beside_whole(make, configs, forwards_in_a_side_stream, "", accumulation=2))
