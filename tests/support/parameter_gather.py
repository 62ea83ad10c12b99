# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models that use parameters before, between and behind their blocks, and ranks that send parameters late."""

import contextlib
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.models import VOCABULARY, Block, Model


class Body(nn.Module):
    """Calls the blocks, between parameters of its own and of other modules."""

    def __init__(self, width=8, depth=3):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Around(nn.Module):
    """Uses parameters before and behind the body, in its own compiled code and in modules."""

    def __init__(self, width=8):
        super().__init__()
        self.body = Body(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.shift = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids):
        logits = self.head(self.body(ids)) + self.shift
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class EagerAround(Around):
    """The same, but nothing around the body is compiled, and some of it reads parameters without calling modules."""

    @torch.compiler.disable
    def forward(self, ids):
        x = self.body(ids)
        logits = F.linear(x, self.head.weight) + self.shift
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class TiedAround(Around):
    def __init__(self):
        super().__init__()
        self.head.weight = self.body.embedding.weight
        # A block's parameter that other code uses too.
        self.body.blocks[1].norm.weight = self.body.norm.weight


class ReadsBefore(Around):
    """Uncompiled code reads a parameter in front of the body, without calling its module."""

    @torch.compiler.disable
    def forward(self, ids):
        penalty = self.head.weight.square().mean()
        return super().forward(ids) + penalty


class WritesInForward(Around):
    """Uncompiled code changes parameters of the blocks before these run, and changes them back behind them."""

    @torch.compiler.disable
    def forward(self, ids):
        # The backward reads no bias, so it may change.
        biases = [bias for block in self.body.blocks for bias in (block.up.bias, block.down.bias)]
        with torch.no_grad():
            torch._foreach_mul_(biases[1:], 4)
            biases[0].mul_(4)
        loss = super().forward(ids)
        with torch.no_grad():
            torch._foreach_div_(biases, 4)
        return loss


class Hooked(Around):
    """A hook of a module computes with parameters before the module is called."""

    def __init__(self):
        super().__init__()
        self.before = nn.utils.weight_norm(nn.Linear(VOCABULARY, 4))

    @torch.compiler.disable
    def forward(self, ids):
        penalty = self.before(F.one_hot(ids, VOCABULARY).float()).square().mean()
        return super().forward(ids) + penalty


class ForwardsBody(Body):
    """Calls the forward of its blocks, past whatever waits when a block is called."""

    in_training = True

    def forward(self, ids):
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x) if self.training and not self.in_training else block.forward(x)
        return self.norm(x)


class CallsForwards(Around):
    def __init__(self):
        super().__init__()
        self.body = ForwardsBody()


class CallsForwardsInEvaluation(CallsForwards):
    def __init__(self):
        super().__init__()
        self.body.in_training = False


class HeadInFront(Around):
    """Compiled code reads the head before the blocks too."""

    def forward(self, ids):
        penalty = self.head.weight.square().mean()
        return super().forward(ids) + penalty


class TwoBodies(Around):
    """Compiled code between two bodies reads a layer that is registered behind both."""

    def __init__(self, width=8):
        super().__init__(width)
        del self.head
        self.second = Body(width)
        self.bridge = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        gate = self.bridge(self.body(ids)).sigmoid()
        logits = self.head(gate * self.second(ids)) + self.shift
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


CASES = (
    *(Around, EagerAround, TiedAround, ReadsBefore, HeadInFront, TwoBodies, WritesInForward),
    *(Hooked, CallsForwards, CallsForwardsInEvaluation),
)
MODELS = {**{model.__name__: model for model in CASES}, "Owner": Model}
DELAY = 0.25


@contextlib.contextmanager
def one_rank_late(delay):
    """Each rank in turn sends its parameters ``delay`` seconds late. Yields the units that were waited for."""
    # Only here, because tests of the core import this file too.
    from deepspeed.compile.features.overlap_gather.feature import OverlapGather

    start, receive = OverlapGather.start, OverlapGather.receive
    turns, waited = iter(range(10**6)), []

    def late(self):
        if dist.get_rank() == next(turns) % dist.get_world_size():
            if torch.cuda.is_available():
                # There the stream comes late and the host does not wait.
                torch.cuda._sleep(int(delay * 1.5e9))
            else:
                time.sleep(delay)
        start(self)

    def watched(self, unit):
        if unit in self._works:
            waited.append(unit)
        receive(self, unit)

    OverlapGather.start, OverlapGather.receive = late, watched
    try:
        yield waited
    finally:
        OverlapGather.start, OverlapGather.receive = start, receive


def past_the_class(graph, inputs):
    """A backend whose code reads memory without asking classes of tensors, as generated code does."""

    def call(*args):
        with torch._C.DisableTorchFunctionSubclass():
            return graph.forward(*args)

    return call
