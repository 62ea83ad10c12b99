# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models whose blocks are frozen, with adapters that are trained, and gathers that come late."""

import contextlib
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from deepspeed.compile.features.shard_parameters import unit, unit_memory, unsharded_parameters

from support.graph_cache import shapes_no_graph
from support.models import VOCABULARY, Block
from support.subclasses import Scaled
from support.training import batch

WIDTH = 12


class AdaptedBlock(Block):
    """A block that is frozen but for the adapter of one of its layers."""

    def __init__(self, width=WIDTH):
        super().__init__(width)
        self.requires_grad_(False)
        self.first, self.second = nn.Linear(width, 3, bias=False), nn.Linear(3, 2 * width, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return x + self.down(F.gelu(self.up(x) + self.second(self.first(x))))


class BreakingAdapted(AdaptedBlock):
    def forward(self, x):
        h = self.norm(x)
        torch._dynamo.graph_break()
        return x + self.down(F.gelu(self.up(h) + self.second(self.first(h))))


class LendingAdapted(AdaptedBlock):
    """Beside its output it returns a view of a frozen parameter."""

    def forward(self, x):
        return super().forward(x), self.norm.weight[:3]


class ChangingAdapted(AdaptedBlock):
    """The forward changes frozen parameters: in place, by ``.data``, and by other memory."""

    @torch.compiler.disable
    def change(self):
        with torch.no_grad():
            self.norm.bias.add_(0.1)
        self.up.bias.data.mul_(0.9)
        self.down.bias.data = self.down.bias.data + 0.1

    def forward(self, x):
        self.change()
        return super().forward(x)


class ChangingByData(ChangingAdapted):
    """The forward changes frozen parameters by ``.data`` alone, which no version counts."""

    @torch.compiler.disable
    def change(self):
        self.up.bias.data.mul_(0.9)


class DictAdapted(AdaptedBlock):
    """It changes a dict of its caller, and returns nothing."""

    def forward(self, states):
        states["hidden"] = super().forward(states["hidden"])


class InPlaceAdapted(AdaptedBlock):
    """It adds to its input in place, and returns its input."""

    def forward(self, x):
        return x.add_(super().forward(x.clone()))


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Output:
    def __init__(self, hidden):
        self.inner = Slots(hidden)


class SlotsAdapted(AdaptedBlock):
    """It returns an object within an object, of which neither torch nor ``vars()`` knows the tensor."""

    def forward(self, x):
        return Output(super().forward(x))


class AttributeAdapted(AdaptedBlock):
    """It leaves its output in an attribute, beside a view of a frozen parameter."""

    hidden = view = None

    def forward(self, x):
        self.hidden = super().forward(x)
        self.view = self.norm.weight[:3]


class EagerAdapted(AdaptedBlock):
    """It runs uncompiled, and returns an object."""

    @torch.compiler.disable
    def eagerly(self, x):
        return Output(super().forward(x))

    def forward(self, x):
        return self.eagerly(x)


class CheckpointingInside(EagerAdapted):
    """It checkpoints a part of itself."""

    def part(self, x):
        return self.down(F.gelu(self.up(x) + self.second(self.first(x))))

    @torch.compiler.disable
    def eagerly(self, x):
        return Output(x + checkpoint(self.part, self.norm(x), use_reentrant=False))


class Scale(torch.autograd.Function):
    """It keeps a tensor in another way than autograd's."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


class KeepingAdapted(AdaptedBlock):
    """Its backward reads only what a function of its own has kept, and it returns an object."""

    def forward(self, x):
        return Output(x + Scale.apply(self.second(self.first(x))[..., :WIDTH], self.norm.weight))


class CastingAdapted(AdaptedBlock):
    """The forward gives a frozen parameter the dtype of its input, as bitsandbytes does with the bias of a layer."""

    def __init__(self, width=WIDTH):
        super().__init__(width)
        self.norm.bias.data = self.norm.bias.data.double()

    @torch.compiler.disable
    def cast(self, x):
        if self.norm.bias.dtype != x.dtype:
            self.norm.bias.data = self.norm.bias.data.to(x.dtype)

    def forward(self, x):
        self.cast(x)
        return super().forward(x)


class QuantizedAdapted(AdaptedBlock):
    """A frozen weight is made of two tensors."""

    def __init__(self):
        super().__init__()
        self.up.weight = nn.Parameter(Scaled.of(self.up.weight.detach()), requires_grad=False)


class Body(nn.Module):
    of_block = AdaptedBlock

    def __init__(self, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.embedding.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(self.of_block() for _ in range(depth))

    def run(self, x, skip):
        for index, block in enumerate(self.blocks):
            if not (skip and index in (1, 2)):
                x = self.run_block(block, x)
        return x

    def run_block(self, block, x):
        return block(x)

    def forward(self, ids, skip=False):
        return self.run(self.embedding(ids), skip)


class Adapted(nn.Module):
    """Embedding, blocks and head; ``forward(ids, skip)`` returns a loss. ``skip`` leaves out two blocks."""

    of_body = Body

    def __init__(self):
        super().__init__()
        self.body = type(self).of_body()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight.requires_grad_(False)

    def forward(self, ids, skip=False):
        return F.cross_entropy(self.head(self.body(ids, skip)).flatten(0, 1), ids.flatten())


def model_of(**members):
    """Returns a model whose body differs in some methods or its block."""
    return type("Adapted", (Adapted,), {"of_body": type("Body", (Body,), members)})


def again(self, x, skip):
    """Comes back to earlier blocks."""
    return Body.run(self, Body.run(self, x, skip), skip)


def with_external_views(self, x, skip):
    lent = []
    for block in self.blocks:
        x, view = block(x)
        lent.append(view)
    return x + sum(tensor.sum() for tensor in lent)


def through_a_dict(self, x, skip):
    states = {"hidden": x}
    for block in self.blocks:
        block(states)
    return states["hidden"]


def in_place(self, x, skip):
    return Body.run(self, x.clone(), skip)


def through_objects(self, block, x):
    return block(x).inner.hidden


def through_attributes(self, x, skip):
    views = 0
    for block in self.blocks:
        block(x)
        x, views = block.hidden, views + block.view.sum()
        block.hidden = None
    return x + views


def in_segments(self, x, skip):
    return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)


class Tied(Adapted):
    """Two blocks have one weight, and the head has a weight of a third."""

    def __init__(self):
        super().__init__()
        blocks = self.body.blocks
        blocks[1].up.weight = blocks[3].up.weight
        self.body.norm = blocks[2].norm


class Upper(Adapted):
    """The lower blocks have no adapters, so no gradient flows into them."""

    def __init__(self):
        super().__init__()
        self.body.blocks[:2].requires_grad_(False)


def without_first(self, x, skip):
    """Leaves out the blocks that a backward comes to last."""
    for block in self.blocks[2:] if skip else self.blocks:
        x = block(x)
    return x


class TrainedHead(Adapted):
    """The head is trained, so a backward meets a trained parameter before it comes to the blocks."""

    of_body = type("Body", (Body,), {"run": without_first})

    def __init__(self):
        super().__init__()
        self.head.weight.requires_grad_(True)


class FromElsewhere(Adapted):
    """The blocks are not called by the module around them, but by compiled code."""

    def forward(self, ids, skip=False):
        x = self.body.embedding(ids)
        for block in self.body.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class AroundItself(Body):
    """The model itself calls the blocks."""

    def forward(self, ids, skip=False):
        return super().forward(ids, skip).square().mean()


MODELS = {
    "plain": Adapted,
    "breaking": model_of(of_block=BreakingAdapted),
    "quantized": model_of(of_block=QuantizedAdapted),
    "reentrant": model_of(run_block=lambda self, block, x: checkpoint(block, x.requires_grad_(), use_reentrant=True)),
    "non-reentrant": model_of(run_block=lambda self, block, x: checkpoint(block, x, use_reentrant=False)),
    "segments": model_of(run=in_segments),
    "again": model_of(run=again),
    "tied": Tied,
    "upper": Upper,
    "from elsewhere": FromElsewhere,
    "casting": model_of(of_block=CastingAdapted),
    "trained head": TrainedHead,
    "lending": model_of(of_block=LendingAdapted, run=with_external_views),
    "itself": AroundItself,
}

# Their values leave the blocks in ways that no one outside can see.
HIDING = {
    "dict": model_of(of_block=DictAdapted, run=through_a_dict),
    "in place": model_of(of_block=InPlaceAdapted, run=in_place),
    "slots": model_of(of_block=SlotsAdapted, run_block=through_objects),
    "attribute": model_of(of_block=AttributeAdapted, run=through_attributes),
    "eager": model_of(of_block=EagerAdapted, run_block=through_objects),
    "keeping": model_of(of_block=KeepingAdapted, run_block=through_objects),
    "checkpointing inside": model_of(of_block=CheckpointingInside, run_block=through_objects),
}

CHANGING = {"changing": model_of(of_block=ChangingAdapted), "by data": model_of(of_block=ChangingByData)}


@contextlib.contextmanager
def late(delay):
    """What other ranks send comes ``delay`` seconds late, and memory that is given back holds something else.

    ``delay``: None changes nothing.
    """
    if delay is None:
        yield
        return
    send, give_back = unit.Unit._send, unit_memory.UnitMemory._give_back

    @shapes_no_graph
    def send_late(self, target, at=None, sends_frozen=True):
        send(self, target, at, sends_frozen)
        received = [*_received(self.memory)]
        if sends_frozen and self.memory.frozen.end:
            received.append(self.memory.frozen.memory(self._target))
        self._works = [_Late(self._works, received, delay)]

    @shapes_no_graph
    def spoil(self):
        self.buffer.fill_(255)
        give_back(self)

    with (
        mock.patch.object(unit.Unit, "_send", send_late),
        mock.patch.object(unit_memory.UnitMemory, "_give_back", spoil),
    ):
        yield


def _received(of_unit):
    """Yields the memory into which a gather receives trained parameters of a unit, whose memory this is."""
    for segment in of_unit.trained:
        memory = segment.memory(of_unit.buffer)
        for first, numel, _ in segment.runs():
            shards = memory[first : first + segment.world * numel].chunk(segment.world)
            yield from (shard for rank, shard in enumerate(shards) if rank != segment.rank)


class _Late:
    """What a gather brings is there only after it was waited for. On a GPU, only a stream that waits finds it."""

    def __init__(self, works, received, delay):
        self._delay = delay
        for work in works:
            work.wait()
        self._received = [(memory, memory.clone()) for memory in received]
        for memory in received:
            memory.fill_(255)
        self._arrives = torch.cuda.Stream() if any(memory.is_cuda for memory in received) else None
        if self._arrives is not None:
            self._arrives.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._arrives):
                torch.cuda._sleep(int(delay * 10**9))
                self._arrive()
                for tensors in self._received:
                    for tensor in tensors:
                        tensor.record_stream(self._arrives)

    def _arrive(self):
        for memory, values in self._received:
            memory.copy_(values)

    def wait(self):
        if self._arrives is not None:
            torch.cuda.current_stream().wait_stream(self._arrives)
        else:
            time.sleep(self._delay)
            self._arrive()


def freeze(module, trained):
    """Freezes parameters: none for "all", other ones of each block for "some", and the same of all blocks for "alike".

    Blocks that are alike are compiled once. For "adapters" all stays as it was made.
    """
    if trained == "adapters":
        return
    for index, (name, parameter) in enumerate(module.named_parameters()):
        is_frozen = {"all": False, "some": index % 3 == 0, "alike": ".up." in name or "embedding" in name}[trained]
        parameter.requires_grad_(not is_frozen)


def trained_on(engine, module):
    """Trains one more step; returns the loss and the parameters."""
    loss = engine(batch(9, 0, dist.get_rank(), 4))
    engine.backward(loss)
    engine.step()
    with unsharded_parameters(engine):
        return [loss.detach(), *(parameter.detach().clone() for parameter in module.parameters())]


def beside_whole(make, configs, work, folder, **case):
    """Does the same with sharded and with whole parameters; returns what each of the two has then.

    Args:
        make: (name of a model, configuration, case) -> module and engine.
        configs: with sharded, and with whole parameters.
        work: (engine, module, a folder of its own) -> None, or tensors.
    """
    results = []
    for kind, config in zip(("sharded", "whole"), configs, strict=True):
        module, engine = make("plain", config, **case)
        trained_on(engine, module)
        returned = work(engine, module, f"{folder}/{kind}") or []
        results.append([*returned, *trained_on(engine, module)])
        with unsharded_parameters(engine):
            engine.destroy()
        results[-1].append(module(batch(2, 2, 2, 4)).detach())
    return results
