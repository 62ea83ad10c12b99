# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Sharded blocks whose outputs reach blocks of other modules, as in diffusers' UNet2DConditionModel and ControlNet."""

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from deepspeed.compile.features.shard_parameters import unsharded_parameters
from deepspeed.compile.features.shard_parameters.feature import sharded_blocks

from support.beside import Beside
from support.ids import vary
from support.models import VOCABULARY, Block
from support.on_ranks import on_ranks
from support.training import BOUND, Case, batch

WIDTH, DEPTH = 12, 2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))

    def forward(self, x):
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return outputs


class Decoder(Encoder):
    def forward(self, skips):
        x = 0
        for block, skip in zip(self.blocks, reversed(skips), strict=True):
            x = block(x + skip)
        return x


class UNet(nn.Module):
    """Its decoder's blocks read the outputs of its encoder's blocks in reverse order."""

    def __init__(self):
        super().__init__()
        self.embedding, self.encoder, self.decoder = nn.Embedding(VOCABULARY, WIDTH), Encoder(), Decoder()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, residuals=(0,) * DEPTH):
        skips = [x + residual for x, residual in zip(self.encoder(self.embedding(ids)), residuals, strict=True)]
        return F.cross_entropy(self.head(self.decoder(skips)).flatten(0, 1), ids.flatten())


class Controlled(nn.Module):
    """A trained encoder adds to the outputs of the frozen encoder of a UNet.

    The backward runs through the frozen decoder and the trained encoder, and not through the frozen encoder.
    """

    def __init__(self):
        super().__init__()
        self.unet = UNet().requires_grad_(False)
        self.embedding, self.control = nn.Embedding(VOCABULARY, WIDTH), Encoder()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, ids):
        outputs = self.control(self.embedding(ids))
        return self.unet(ids, [projection(x) for projection, x in zip(self.projections, outputs, strict=True)])


@pytest.mark.options("compile.shard_parameters")
@vary("kept", [None], slow=[2])
@vary("model, shards", [(Controlled, "all"), (Controlled, "frozen")], slow=[(UNet, "all")])
@on_ranks(2)
def test_blocks_that_read_what_blocks_elsewhere_return(model, shards, kept):
    """A backward would not come to frozen blocks that a gradient crosses on its way to trained ones."""
    options = {"regional_compilation": True, "shard_parameters": shards, "keep_gathered": kept}
    pair = Beside(model(), Case(stage=2, config={"compile": options}))
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    at_rest = sum(not unit.is_gathered for unit in sharded_blocks(pair.engine).units)
    with unsharded_parameters(pair.engine):
        error = pair.last_error()
    assert error < BOUND and at_rest >= 2 * DEPTH
