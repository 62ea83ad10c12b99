# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models of images: convolutions under Inductor, which lays out their weights anew, and batches that are uneven."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from support.beside import Beside, check
from support.ids import vary
from support.models import Block
from support.training import Case, device

CHANNELS = 8


def images(step, count=2):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.rand(count, 3, 8, 8, generator=generator).to(device())


class Convolutions(nn.Module):
    """Convolutions of each kind in one graph."""

    def __init__(self):
        super().__init__()
        self.usual = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False)
        self.transposed = nn.ConvTranspose2d(CHANNELS, 4, 2, stride=2)
        self.of_one_dimension = nn.Conv1d(4, 4, 5, stride=4)

    def forward(self, x):
        x = torch.tanh(self.usual(x))
        x = torch.tanh(self.transposed(self.depthwise(x)))
        return self.of_one_dimension(x.flatten(2)).square().mean()


class ChannelsLast(Convolutions):
    def forward(self, x):
        return super().forward(x.contiguous(memory_format=torch.channels_last))


class Residual(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS) if norm == "batch" else nn.GroupNorm(2, CHANNELS)
        self.out = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x):
        return x + self.out(torch.relu(self.norm(self.convolution(x))))


class ResNet(nn.Module):
    """Its blocks lie in a Sequential, whose forward is left uncompiled when they are graphs of their own."""

    def __init__(self, norm):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1)
        self.stage = nn.Sequential(Residual(norm), Residual(norm))
        self.head = nn.Linear(CHANNELS, 4)

    def forward(self, x):
        return self.head(self.stage(self.stem(x)).mean((2, 3))).square().mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(CHANNELS) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class VisionTransformer(nn.Module):
    """Patches, a class token and positions, which are for the whole batch, and blocks."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, CHANNELS, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, CHANNELS))
        self.positions = nn.Parameter(torch.randn(1, 5, CHANNELS))
        self.norm = nn.LayerNorm(CHANNELS)
        self.encoder = Encoder()
        self.head = nn.Linear(CHANNELS, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(self.norm(x))[:, 0]).square().mean()


def make_resnet_of_batch_norm():
    return ResNet("batch")


def make_resnet_of_group_norm():
    return ResNet("group")


def train(make, case, counts=(2, 2, 2)):
    """Trains with as many images in each step; a pair of counts is that of rank 0 and that of the others."""
    torch.manual_seed(0)
    pair = Beside(make(), case)
    for step, count in enumerate(counts):
        own = count if isinstance(count, int) else count[dist.get_rank() > 0]
        pair.step(images(step, own))
    return pair.end()


@vary(
    "stage, make, regional, from_graphs",
    [(1, Convolutions, None, 7)],
    expects="from_graphs",
    slow=[
        (2, ChannelsLast, None, 7),
        (2, make_resnet_of_batch_norm, False, 14),
        (1, make_resnet_of_group_norm, True, 14),
        (2, VisionTransformer, None, 20),
    ],
)
def test_convolutions(ranks, stage, make, regional, from_graphs):
    """The gradient of a weight that Inductor has laid out anew would be reduced in that layout."""
    config = {} if regional is None else {"compile": {"regional_compilation": regional}}
    case = Case(stage=stage, backend="inductor", config=config)
    for result in check(ranks(2).run(train, make, case)):
        # Were they not compiled, they would train as well.
        assert result.from_graphs == [from_graphs] * 3


# Uneven batches --------------------------------------------------------------------------------------------------


class Queries(nn.Module):
    """A layer with learned queries, which are for the whole batch.

    In a batch of one their gradient is that of the norm's input, which comes before those of its parameters.
    """

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, CHANNELS))
        self.norm = nn.LayerNorm(CHANNELS)
        self.block = Block(CHANNELS)

    def forward(self, x):
        return self.block(self.norm(x + self.queries))


class WithQueries(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(48, CHANNELS)
        self.encoder = Encoder()
        self.encoder.layers = nn.ModuleList(Queries() for _ in range(2))

    def forward(self, x):
        return self.encoder(self.patches(x.reshape(len(x), 4, 48))).square().mean()


@vary(
    "make, regional",
    [(VisionTransformer, True), (WithQueries, True), (WithQueries, False)],
    slow=[(VisionTransformer, False)],
)
@vary("stage", [1, 2])
def test_a_batch_of_one_on_one_rank(ranks, make, stage, regional):
    """A rank that has a graph for a batch of one would give its gradients in another order than the others."""
    case = Case(stage=stage, config={"compile": {"regional_compilation": regional}}, bucket=40)
    check(ranks(2).run(train, make, case, (4, (4, 1), 4, (1, 4), 4)))


@pytest.mark.slow
def test_a_batch_of_one_in_generated_code(ranks):
    case = Case(backend="inductor", config={"compile": {"regional_compilation": True}}, bucket=40)
    check(ranks(2).run(train, WithQueries, case, ((4, 1), 4, (4, 1))))


def test_a_batch_of_one_comes_first(ranks):
    """Ranks would keep the order of a first backward that was another one on each rank."""
    check(ranks(2).run(train, WithQueries, Case(bucket=40), ((1, 4), 4, (4, 1))))
