# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Training on streams other than the default one. Only on GPUs there are streams."""

import pytest
import torch

from support import streams
from support.training import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs: a CPU has no streams"),
]
BOUND = 1e-5
# With the former every gradient is held as it is, with the latter all are packed.
BUCKETS = [150, 10**6]


@pytest.mark.parametrize("how", ["joined", "unused", "dropped"])
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize(
    "model, backend", [("OneGraph", "eager"), ("OneGraph", "inductor"), ("EagerBlocks", "eager"), ("Wide", "eager")]
)
def test_micro_batches_on_two_streams(ranks, model, backend, bucket, how):
    case = Case(model=model, backend=backend, bucket=bucket, accumulation=3 if how == "dropped" else 2, steps=4)
    for error, intact, ahead in ranks(2).run(streams.accumulate_over_streams, case, how):
        # The first steps compile.
        assert ahead >= 2, "the host was behind the device, so nothing was shown"
        assert intact, "memory was written to after it had been given to others"
        assert error < BOUND


@pytest.mark.parametrize("how", ["joined", "unused"])
def test_targets_of_two_streams(ranks, how):
    case = Case(stage=2, accumulation=2, steps=4)
    for error, intact, ahead in ranks(2).run(streams.accumulate_over_streams, case, how):
        assert ahead >= 2 and intact
        assert error < BOUND


@pytest.mark.parametrize("model", ["OneGraph", "EagerBlocks"])
@pytest.mark.parametrize("stage, accumulation", [(1, 1), (1, 2), (2, 2)])
def test_training_in_a_side_stream(ranks, stage, accumulation, model):
    case = Case(model=model, stage=stage, accumulation=accumulation, steps=4)
    for seen in ranks(2).run(streams.train_in_a_side_stream, case):
        assert seen["error"] < BOUND
        assert seen["streams"] == {"side"}
        assert not seen["waited"], "the side stream waited for the default one"
        assert seen["deferred"] == 0
