# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 under DeepCompile is the base's, and shares this fork's ``fx.py``."""

import pytest
import torch

from support.training import Case
from support.zero3 import train_zero3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="DeepCompile ZeRO-3 needs CUDA, and this test 2 GPUs"),
]
BUCKET = 4 * 2**20  # elements


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("model", ["OneGraph", "SeveralGraphs", "NoParametersFirstButGrad"])
def test_zero3_trains_and_gives_its_buckets_back(ranks, model, backend):
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    case = Case(model=model, stage=3, backend=backend, bucket=BUCKET, config=config)
    for error, after_steps in ranks(2).run(train_zero3, case):
        assert error < 1e-5
        # One bucket that stayed would be 16 MiB; the model's own states are some kilobytes.
        assert max(after_steps) < BUCKET, after_steps
