# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``tools/fits`` for long sequences: inputs of layers on the host, MLPs and losses in tiles."""

import collections

import pytest
import torch
from torch import nn

from deepspeed.compile.fits import fits
from deepspeed.compile.tools.fits import estimate, gradients
from deepspeed.compile.tools.fits.modes import Mode, Question
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

from support.models import Stack

WIDTH, WIDER, TOKENS, LAYERS, VOCABULARY = 32, 256, 64, 6, 4096
INPUT = 4 * TOKENS * WIDTH


class SomeMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).sin())


class RealTiles(SomeMLP):
    def forward(self, x):
        return TiledMLP.apply(SomeMLP.forward, self, x, 8, list(self.parameters()))


class Layer(nn.Module):
    kind = SomeMLP

    def __init__(self):
        super().__init__()
        self.first, self.mlp = nn.Linear(WIDTH, WIDTH), self.kind()

    def forward(self, x):
        x = x + self.first(x).cos()
        return x + self.mlp(x)


class TiledLayer(Layer):
    kind = RealTiles


class Model(nn.Module):
    def __init__(self, kind=Layer):
        super().__init__()
        self.body, self.head = Stack(kind, LAYERS, WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return nn.functional.cross_entropy(self.head(self.body(ids)).flatten(0, 1), ids.flatten())


def found(checkpoint=False, make_model=Model, **pieces):
    question = Question(
        dtype=torch.float32,
        sequence=TOKENS,
        micro_batch=1,
        batch=lambda *sizes: {"ids": torch.zeros(1, TOKENS, dtype=torch.long)},
        **pieces,
    )
    subject = estimate.Subject(make_model, question, lambda sentence: None)
    activations = subject.activations(Mode("", checkpoint=checkpoint), question)
    assert subject.untraceable == {}
    return activations


def highest(moments):
    return max(moment.most for moment in moments)


def test_inputs_on_the_host():
    """Inputs would count on the device, or come back all at once, or the host's memory would not count."""
    here, away = (found(checkpoint=True, inputs_on_host=on_host) for on_host in (False, True))
    # Two stay, as an H200 has shown: its peak of a forward is in benchmarks/fits.py.
    gone = (LAYERS - 2) * INPUT
    assert here.forward[-1].after - away.forward[-1].after == gone
    assert highest(here.forward) - highest(away.forward) == gone
    # A layer computes with one that came back.
    assert highest(away.backward) <= highest(here.backward) - gone + INPUT
    assert (here.on_host, away.on_host) == (0, (LAYERS - 1) * INPUT)
    # Layers that are not checkpointed save no inputs in this way.
    assert found(inputs_on_host=True).on_host == INPUT * 0


def kept_by_autograd():
    """Returns the bytes that autograd keeps of a model with DeepSpeed's tiles."""
    kept, model, ids = {}, Model(TiledLayer), torch.zeros(1, TOKENS, dtype=torch.long)

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.body(ids)
    others = {parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), ids)}
    return sum(size for place, size in kept.items() if place not in others)


def test_mlps_in_tiles():
    """A tiled MLP would keep what a whole one keeps, or its layer's other code would be traced twice."""
    tiled, whole = found(mlp_tiles=8, loss_tiles=1), found(loss_tiles=1)
    # The hidden values of all layers' MLPs, and in the backward one layer's gradient of these.
    hidden = 4 * TOKENS * WIDER
    assert whole.forward[-1].after - tiled.forward[-1].after > LAYERS * hidden * 0.9
    # And what the loss is made of: its input, in one tile, and itself.
    assert tiled.forward[-1].after == kept_by_autograd() + INPUT + 8 * TOKENS + 4
    arrived = collections.Counter(moment.gradient for moment in tiled.backward if moment.gradient)
    assert arrived == {name: 1 for name, _ in Model().named_parameters()}


def test_loss_in_tiles():
    """Logits would exist as a whole, or the head's gradient would be handed over with each tile."""
    logits, weight = 4 * TOKENS * VOCABULARY, 4 * VOCABULARY * WIDTH
    whole, tiled = found(checkpoint=True), found(checkpoint=True, loss_tiles=16)
    assert highest(whole.forward) > logits > 2 * highest(tiled.forward)
    # Tiles add up the gradient of the head, beside a tile's own one.
    assert highest(tiled.backward) < 2 * weight + logits // 4
    arrived = collections.Counter(moment.gradient for moment in tiled.backward if moment.gradient)
    assert arrived["head.weight"] == 1


def test_a_sequence_that_ranks_share():
    """A rank's activations would be those of the whole sequence, or its states would be cut over fewer ranks."""

    def row(sequence, **more):
        config = {"zero_optimization": {"stage": 1}, "compile": {"deepcompile": True}, **more}
        make_batch = {"batch": lambda rows, tokens: {"ids": torch.zeros(rows, tokens, dtype=torch.long)}}
        return fits(Model, gpus=4, sequence=sequence, config=config, modes=[], **make_batch).rows[0]

    shared, alone = row(2 * TOKENS, sequence_parallel_size=2, train_batch_size=2), row(TOKENS, train_batch_size=4)
    assert (shared.at_rest, shared.peak) == (alone.at_rest, alone.peak)
    with pytest.raises(ValueError, match="has seq_parallel_communication_data_type, which is not estimated"):
        row(2 * TOKENS, sequence_parallel_size=2, seq_parallel_communication_data_type="bf16")


def test_messages_where_ranks_share_a_sequence():
    """DeepSpeed sends gradients in fp32 there, twice the bytes that would be counted."""
    parameters = [torch.empty(4096, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(4)]
    plain, sent = (gradients.send(parameters, [3, 2, 1, 0], 2, sent=dtype) for dtype in (None, torch.float32))
    assert max(sent.arrived) > max(plain.arrived)


def test_what_the_allocator_reserves():
    """With tiles a mode would be said to fit that leaves less than was reserved where they were measured."""
    plain, tiled = (fits(Model, sequence=TOKENS, modes=[Mode("")], **asked) for asked in ({}, {"mlp_tiles": 8}))
    assert tiled.reserved(Mode("")) > plain.reserved(Mode(""))


class Without(Layer):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)


class Twice(Layer):
    def forward(self, x):
        return self.mlp(super().forward(x))


class NoHead(Model):
    def get_output_embeddings(self):
        return None


class CallsLayers(Model):
    """As nanoGPT."""

    def __init__(self):
        super().__init__()
        self.layers, self.embedding = self.body.layers, self.body.embedding
        del self.body

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.follows("; ask without tiles of MLPs")
@pytest.mark.follows("and not one; ask without tiles of MLPs")
@pytest.mark.follows("; ask without tiles of the loss")
@pytest.mark.parametrize(
    "make_model, asked, sentence",
    [
        (lambda: Model(Without), {"mlp_tiles": 2}, "Without has 0 modules whose class is named ...MLP"),
        (lambda: Model(Twice), {"mlp_tiles": 2}, "a block calls its SomeMLP 2 times"),
        (CallsLayers, {"mlp_tiles": 2}, "the model is one graph"),
        (CallsLayers, {"loss_tiles": 2}, "CallsLayers has no get_output_embeddings"),
        (NoHead, {"loss_tiles": 2}, "NoHead has no get_output_embeddings"),
    ],
)
def test_refused(make_model, asked, sentence):
    """The answer would be that of a model without tiles."""
    with pytest.raises(ValueError, match=sentence):
        fits(make_model, sequence=TOKENS, modes=[Mode("")], **asked)
    assert fits(make_model, sequence=TOKENS, modes=[Mode("")]).first.forward is not None
