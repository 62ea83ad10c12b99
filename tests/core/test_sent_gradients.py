# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What is sent of a gradient: from which memory, in which dtype, and nothing once it was dropped."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.beside import Beside, check
from support.lifetime import backward
from support.models import Model
from support.on_ranks import on_ranks
from support.training import NOTHING, Case, batch, build, held, make_engine, train_beside_plain_loop


class TwoTables(Model):
    """Two parameters have one gradient, which is no view of another tensor: a graph could donate a gradient."""

    def __init__(self):
        super().__init__()
        self.second = nn.Parameter(torch.zeros_like(self.embedding.weight))

    def enter(self, ids):
        return F.embedding(ids, self.embedding.weight + self.second)


@on_ranks(2)
def test_two_parameters_with_one_gradient():
    """The second reduction would read memory that the first has sent."""
    # With a bucket of one element no gradient is small enough to be copied just because it is packed.
    pair = Beside(TwoTables(), Case(stage=2, bucket=1))
    for step in range(3):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    check([pair.end()])


def test_communication_data_type(ranks):
    """Gradients would be sent in the dtype of the parameters, which takes twice the memory."""
    peaks = []
    for config in ({}, {"communication_data_type": "fp16"}):
        results = ranks(2).run(train_beside_plain_loop, Case(steps=1, bucket=10**6, config=config))
        peaks.append([result.counters["peak_pending"] for result in results])
    assert peaks[0] == [2 * peak for peak in peaks[1]] and peaks[1][0] > 0


# Sums of another dtype than the parameters, which parameter.grad cannot hold, and sums that were reduced.
SUMS = {
    "unreduced": Case(stage=1, dtype="fp16", accumulation=2, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "bound": Case(stage=2, accumulation=2),
}


@pytest.mark.parametrize("kind, how", [("unreduced", "zero_grad()"), ("bound", "load_checkpoint()")])
@on_ranks(2)
def test_what_was_dropped_is_not_sent(tmp_path, kind, how):
    """The next step would have gradients of micro-batches that do not belong to it."""
    engine = make_engine(build(SUMS[kind]), SUMS[kind])
    engine.save_checkpoint(tmp_path)
    backward(engine)
    assert gradient_counters(engine)[kind] > 0
    engine.load_checkpoint(tmp_path) if how == "load_checkpoint()" else engine.zero_grad()
    assert held(gradient_counters(engine)) == NOTHING
    engine.destroy()
