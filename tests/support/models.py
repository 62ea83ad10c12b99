# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Small models, one for each way in which a gradient can reach, or miss, a compiled graph."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from support.subclasses import Scaled

VOCABULARY = 24


def double(gradient):
    return gradient * 2


def copied_with_hook(self, memo):
    """``__deepcopy__`` of modules with tensor hooks, which deepcopy leaves behind."""
    copied = type(self).__new__(type(self))
    memo[id(self)] = copied
    nn.Module.__init__(copied)
    for name, module in self._modules.items():
        copied._modules[name] = copy.deepcopy(module, memo)
    for name, parameter in self._parameters.items():
        copied._parameters[name] = copy.deepcopy(parameter, memo)
    copied.add_hook()
    return copied


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class BreakingBlock(Block):
    """The graph breaks inside, so one compiled graph serves every block of a model."""

    def forward(self, x):
        h = F.gelu(self.up(self.norm(x)))
        torch._dynamo.graph_break()
        return x + self.down(h)


class EagerBlock(Block):
    """Kept out of the compiler."""

    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class SkippedBlock(Block):
    """A frame that the compiler gives up: it breaks inside a context manager that it cannot resume."""

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu() if x is None else torch.autograd.profiler.record_function("skipped"):
            torch._dynamo.graph_break()
            return super().forward(x)


class Model(nn.Module):
    """Embedding, blocks and head; ``forward(ids)`` returns the loss of predicting the ids.

    Subclasses change one thing each. ``forward`` takes ``skip``: whether to leave out the second block.
    """

    block = Block

    def __init__(self, width=8, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(self.block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids, skip=False):
        x = self.enter(ids)
        for index, block in enumerate(self.blocks):
            if not (skip and index == 1):
                x = self.run_block(block, x)
        return self.leave(x, ids)

    def enter(self, ids):
        return self.embedding(ids)

    def run_block(self, block, x):
        return block(x)

    def leave(self, x, ids):
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class OneGraph(Model):
    pass


class Body(Model):
    """The embedding and the blocks; returns what they make of the ids."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        del self.head

    def leave(self, x, ids):
        return x


class BlocksWithin(nn.Module):
    """As models of transformers are built: a module inside of the model calls the blocks."""

    def __init__(self, width=8):
        super().__init__()
        self.body = Body(width=width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids, skip=False):
        return F.cross_entropy(self.head(self.body(ids, skip)).flatten(0, 1), ids.flatten())


class ReturnsLogits(BlocksWithin):
    """Returns (loss, logits)."""

    def forward(self, ids, skip=False):
        logits = self.head(self.body(ids, skip))
        # In fp32, as in those of transformers.
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()), logits


class AlignedBlocksWithin(BlocksWithin):
    """Parameters have multiples of 32 elements, so they begin at multiples of 16 in the partitions of two ranks."""

    def __init__(self):
        super().__init__(width=32)


class Wide(Model):
    """Gradients large enough to be reduced where they lie, and alike, so that a compiler would reuse their memory."""

    def __init__(self):
        super().__init__(width=512, depth=4)


class WideRepeatedLayers(Wide):
    block = BreakingBlock


class HookedBehindLogits(BlocksWithin):
    """The same, with a parameter that a graph must not reduce between the two."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.add_hook()

    def add_hook(self):
        self.scale.register_hook(double)

    __deepcopy__ = copied_with_hook

    def forward(self, ids, skip=False):
        logits = self.head(self.body(ids, skip))
        return F.cross_entropy((logits * self.scale).flatten(0, 1), ids.flatten()), logits


class SeveralGraphs(Model):
    def run_block(self, block, x):
        torch._dynamo.graph_break()
        return block(x)


class RepeatedLayers(Model):
    block = BreakingBlock


class WeightInTwoGraphs(Model):
    def leave(self, x, ids):
        x = x + self.blocks[0].up(x)[..., : x.shape[-1]]
        torch._dynamo.graph_break()
        return super().leave(x, ids)

    def enter(self, ids):
        x = super().enter(ids)
        x = x + self.blocks[0].up(x)[..., : x.shape[-1]]
        torch._dynamo.graph_break()
        return x


class TiedEmbedding(SeveralGraphs):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.weight = self.embedding.weight


class TiedInOneGraph(Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.weight = self.embedding.weight


class CompiledAndEager(Model):
    """One weight used in compiled code and in code that is not compiled."""

    def leave(self, x, ids):
        return super().leave(self.outside(x), ids)

    @torch.compiler.disable
    def outside(self, x):
        return x + F.linear(x, self.blocks[0].down.weight[:, : x.shape[-1]])


class NoParametersFirst(Model):
    """The first forward graph has no parameters."""

    def forward(self, ids, skip=False):
        ids = (ids + 1) % VOCABULARY
        torch._dynamo.graph_break()
        return super().forward(ids, skip)


class NoParametersFirstButGrad(Model):
    """The first forward graph has no parameters, but an input that requires grad, so it has a backward."""

    def forward(self, ids, skip=False):
        scale = torch.ones((), requires_grad=True, device=ids.device) * 1.0
        scale = self.scale(scale)
        torch._dynamo.graph_break()
        self._scale = scale
        return super().forward(ids, skip)

    def scale(self, scale):
        return scale * 2.0 - 1.0

    def leave(self, x, ids):
        scale, self._scale = self._scale, None
        return super().leave(x * scale.to(x.dtype), ids)


class NoParametersLast(Model):
    """The last forward graph has no parameters."""

    def leave(self, x, ids):
        logits = self.head(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class SkippedFrame(Model):
    block = SkippedBlock


class EagerBlocks(Model):
    block = EagerBlock


class NotCompilable(Model):
    """The compiler gets nothing of the whole model."""

    @torch.compiler.disable
    def forward(self, ids, skip=False):
        return super().forward(ids, skip)


class FrozenAndUnused(Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks[1].up.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))


class OddSizes(Model):
    """Parameters of one element and of none."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gain = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def enter(self, ids):
        return super().enter(ids) * self.gain + self.empty.sum()


class FrozenSubclass(OddSizes):
    """A frozen weight of each block is made of two tensors."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for block in self.blocks:
            block.up.weight = nn.Parameter(Scaled.of(block.up.weight.detach()), requires_grad=False)


class SharedGradient(Model):
    """Two parameters with one gradient: their sum is all that is used."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        width = self.embedding.embedding_dim
        self.first, self.second = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))

    def enter(self, ids):
        return super().enter(ids) + (self.first + self.second)


class Hooked(Model):
    """A user's hook changes a gradient before it is accumulated."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_hook()

    def add_hook(self):
        self.head.weight.register_hook(double)

    __deepcopy__ = copied_with_hook


class Checkpointed(Model):
    def run_block(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class CheckpointedEagerly(Model):
    """Checkpointing outside of the compiler around blocks inside."""

    @torch.compiler.disable(recursive=False)
    def run_block(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class CheckpointedReentrant(Model):
    def run_block(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


class FillsPartition(nn.Module):
    """Two parameters of equal size, so that with two ranks each fills a partition exactly."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY, bias=False)

    def forward(self, ids, skip=False):
        return F.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


class FewParameters(nn.Module):
    """Fewer elements than ranks can share evenly."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, ids, skip=False):
        return (self.weight * ids.float().mean()).square().mean() * 1e-3


CASES = {
    cls.__name__: cls
    for cls in (
        OneGraph,
        SeveralGraphs,
        RepeatedLayers,
        WeightInTwoGraphs,
        TiedEmbedding,
        TiedInOneGraph,
        CompiledAndEager,
        NoParametersFirst,
        NoParametersFirstButGrad,
        NoParametersLast,
        SkippedFrame,
        EagerBlocks,
        NotCompilable,
        FrozenAndUnused,
        OddSizes,
        FrozenSubclass,
        SharedGradient,
        Hooked,
        Checkpointed,
        CheckpointedEagerly,
        CheckpointedReentrant,
        FillsPartition,
        FewParameters,
        BlocksWithin,
    )
}
# Too slow for every combination, or not returning a loss alone.
OTHER_CASES = {
    cls.__name__: cls for cls in (AlignedBlocksWithin, Wide, WideRepeatedLayers, ReturnsLogits, HookedBehindLogits)
}
# Modules that their author keeps from the compiler are no blocks.
WITH_BLOCKS = [
    name for name, model in CASES.items() if issubclass(model, (Model, BlocksWithin)) and name != "EagerBlocks"
]


class LossOfIds(nn.Module):
    """Maps ids to the loss of a language model of transformers, which predicts them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


def qwen3_config(vocabulary, layers=2, width=32, **others):
    """Returns the configuration of a small Qwen3 of transformers."""
    from transformers import Qwen3Config

    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 32,
        "head_dim": 16,
    }
    return Qwen3Config(**{**sizes, **others})


class Stack(nn.Module):
    """An embedding, and layers of one class that are called one after the other."""

    def __init__(self, kind, layers, width, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


# A small language model of transformers, by the names that most configurations have.
TEXT_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
