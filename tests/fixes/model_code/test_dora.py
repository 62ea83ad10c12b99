# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of DoRA, which peft computes with code that Dynamo cannot trace."""

import importlib.util

import pytest
import torch
import torch.distributed as dist

from support.beside import Beside, check
from support.models import BlocksWithin
from support.on_ranks import on_ranks
from support.training import Case, batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="pip install -r requirements/front_doors.txt"),
]


@on_ranks(2)
def test_each_block_is_one_graph():
    """Each adapted layer would end a graph, and a first step of 3 seconds take 145."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapters = LoraConfig(r=2, use_dora=True, target_modules=["up", "down"], init_lora_weights=False)
    pair = Beside(get_peft_model(BlocksWithin(), adapters), Case())
    # What Dynamo traces in the place of other code must outlive this.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    # That of the first block, whose input needs no gradient, of the other blocks, and of head and loss.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    check([pair.end()])
