# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What long sequences leave on the device: inputs of checkpointed blocks on the host, and MLPs in tiles.

On a CPU the host has no other memory, so "on the host" is a copy here, and the block's input must be freed.
"""

import contextlib
import dataclasses
import runpy
from pathlib import Path
from typing import Callable, ContextManager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.runtime.activation_checkpointing import checkpointing, offload_activations
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, sequence_tiled_compute
from deepspeed.utils import safe_get_full_fp32_param

from support.ids import vary
from support.training import BOUND, batch, compile_backend, device, engine_by_configuration, total_error

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
layers = pytest.importorskip("transformers.modeling_layers", reason="pip install -r requirements/front_doors.txt")

SLOW = pytest.mark.slow
VOCABULARY, WIDTH, DEPTH = 24, 16, 3
KEPT = {"regional_compilation": True}
SHARDED = {"regional_compilation": True, "shard_parameters": "all"}


class MLP(nn.Module):
    def __init__(self, tiles):
        super().__init__()
        self.tiles = tiles
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        if not self.tiles:
            return self.compute(x)
        return TiledMLP.apply(MLP.compute, self, x, self.tiles, [*self.parameters()])

    def compute(self, x):
        return self.down(torch.tanh(self.up(x)))


class Layer(layers.GradientCheckpointingLayer):
    """A layer as those of transformers' models."""

    def __init__(self, tiles):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP(tiles)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Body(nn.Module):
    def __init__(self, tiles):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(tiles) for _ in range(DEPTH))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    def __init__(self, tiles=0):
        super().__init__()
        self.body, self.lm_head = Body(tiles), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return nn.functional.cross_entropy(self.lm_head(self.body(ids)).flatten(0, 1), ids.flatten())


class LossInTiles(Net):
    """As docs/recipes/long_sequences.md has it."""

    def forward(self, ids):
        return self.loss(self.body(ids), ids) / ids.numel()

    def of_tile(self, x, y):
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), y.flatten(), reduction="sum")

    @torch.compiler.disable
    def loss(self, hidden, labels):
        return sequence_tiled_compute(
            self.of_tile,
            hidden.shape[1],
            4,
            {"x": hidden, "y": labels},
            {},
            "x",
            [*self.lm_head.parameters()],
            output_unshard_dimension=0,
            output_reduction="sum",
        )


def world_of(options):
    return 2 if options == SHARDED else 1


def plain(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=False)


def saved_on_host():
    # Without pinning, torch takes what lies on a CPU as it is.
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def around_each(function, *inputs):
    """What transformers makes of ``gradient_checkpointing_enable(offload=True)``."""
    with saved_on_host():
        return plain(function, *inputs)


@contextlib.contextmanager
def nothing(model):
    yield contextlib.nullcontext, contextlib.nullcontext


@contextlib.contextmanager
def around_forward(model):
    yield contextlib.nullcontext, saved_on_host


@contextlib.contextmanager
def deepspeeds_option(model):
    """``"activation_checkpointing": {"cpu_checkpointing": true}``."""
    on_accelerator = checkpointing.copy_to_device
    on_cpu = device().type == "cpu"

    def copy(item, **how):
        # DeepSpeed says "the host" by a device, and "the accelerator" by a name.
        to_host = isinstance(how["device"], torch.device)
        return [part.clone() if to_host and how["criterion_func"](part) else part for part in item]

    with (
        mock.patch.object(checkpointing, "CPU_CHECKPOINT", True),
        mock.patch.object(checkpointing, "copy_to_device", copy if on_cpu else on_accelerator),
    ):
        yield contextlib.nullcontext, contextlib.nullcontext


@contextlib.contextmanager
def deepspeeds_context(model):
    manager = offload_activations.CheckpointHiddenStatesOffload(
        use_pin_memory=False, min_offload_bytes=0, max_fwd_stash_count=0, keep_last_count=0
    )
    # On a CPU it leaves all where it is. A Mock would keep the tensors.
    leaves = manager._should_skip if device().type != "cpu" else lambda tensor: False
    with mock.patch.object(manager, "_should_skip", leaves):
        yield lambda: manager, contextlib.nullcontext


@contextlib.contextmanager
def of_trl(model):
    offloading = pytest.importorskip("trl.models.activation_offloading")
    with mock.patch.object(torch.accelerator, "current_accelerator", device):
        manager = offloading.get_act_offloading_ctx_manager(model, False, use_streams=False, min_offload_size=0)
    # TRL empties the device's cache where another test has imported bitsandbytes, and a CPU has none.
    with mock.patch.object(torch.cpu, "empty_cache", lambda: None, create=True):
        yield contextlib.nullcontext, lambda: manager


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to keep the inputs of checkpointed blocks on the host.

    Attributes:
        checkpoint: the function with which layers are checkpointed.
        contexts: takes the model; yields the contexts of a step and of a forward.
        on_device: how many inputs of blocks a forward leaves on the device.
    """

    checkpoint: Callable
    contexts: Callable[[nn.Module], ContextManager] = nothing
    on_device: int = 0


WAYS = {
    "none": Way(plain, on_device=DEPTH),
    "transformers": Way(around_each),
    "torch": Way(plain, around_forward),
    "DeepSpeed-reentrant": Way(checkpointing.checkpoint, deepspeeds_option),
    "DeepSpeed-non-reentrant": Way(checkpointing.non_reentrant_checkpoint, deepspeeds_option),
    "DeepSpeed-context": Way(plain, deepspeeds_context),
    "TRL": Way(plain, of_trl),
}


def train(way, options, tiles=0, kind=Net):
    """Returns how many inputs of blocks the last forward left, the most of them that a backward had at a time, the
    parameters, and how many gradients graphs gave."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs, most = kind(tiles).to(device()).train(), [], 0

    def recorded(function, x):
        def run(x):
            # Runs in the forward, and in the backward with what came back.
            nonlocal most
            inputs.append(StorageWeakRef(x.untyped_storage()))
            most = max(most, sum(not memory.expired() for memory in inputs))
            return function(x)

        return way.checkpoint(run, x)

    for layer in model.body.layers if way else ():
        layer._gradient_checkpointing_func, layer.gradient_checkpointing = recorded, True
    engine = engine_by_configuration(model, bool(options), momentum=0.5, compile=options)
    with (way.contexts if way else nothing)(model) as (around_step, around_forward):
        for step in range(3):
            inputs.clear()
            with around_step():
                with around_forward():
                    loss = engine(batch(step, 0, dist.get_rank(), 8))
                left, most = sum(not memory.expired() for memory in inputs), 0
                engine.backward(loss)
            engine.step()
    values = [safe_get_full_fp32_param(parameter).clone() for parameter in model.parameters()]
    from_graphs = gradient_counters(engine)["from_graphs"] if options else 0
    engine.destroy()
    return left, most, values, from_graphs


def train_off_and_on(name, options, backend="eager", tiles=0):
    with compile_backend(backend):
        *left, values, from_graphs = train(WAYS[name], options, tiles)
        *left_off, off, _ = train(WAYS[name], {})
    return left, left_off, total_error(values, off), from_graphs


@vary(
    "name, options",
    [(name, KEPT) for name in ("none", "DeepSpeed-non-reentrant", "DeepSpeed-context")],
    slow=[
        *((name, KEPT) for name in ("transformers", "torch", "DeepSpeed-reentrant", "TRL")),
        *((name, SHARDED) for name in WAYS),
    ],
)
def test_inputs_of_checkpointed_blocks_on_the_host(ranks, name, options):
    """Compiled blocks would keep their inputs on the device, or compute them again from memory that was freed.

    DeepSpeed's context would keep all that it brought back until the backward ends.

    DeepSpeed's context wraps the ``__call__`` of layers, which would keep layers from being graphs of their own.
    """
    for left, left_off, error, from_graphs in ranks(world_of(options)).run(train_off_and_on, name, options):
        # The backward of a layer needs one input. A layer that computes again adds it to those that never left.
        expected = [WAYS[name].on_device, WAYS[name].on_device + 1]
        assert (left, left_off) == (expected, expected)
        assert error < BOUND and from_graphs > 0


@pytest.mark.slow
@vary(
    "name, tiles, options",
    [
        ("DeepSpeed-context", 0, KEPT),
        ("DeepSpeed-context", 4, KEPT),
        ("DeepSpeed-context", 4, SHARDED),
        ("transformers", 4, SHARDED),
    ],
)
def test_generated_code(ranks, name, tiles, options):
    """Code that Inductor generates would reuse an input's memory that went to the host, or a tile's."""
    expected = [WAYS[name].on_device, WAYS[name].on_device + 1]
    for left, left_off, error, from_graphs in ranks(world_of(options)).run(
        train_off_and_on, name, options, "inductor", tiles
    ):
        assert (left, left_off) == (expected, expected)
        assert error < BOUND and from_graphs > 0


def train_tiled(options):
    with compile_backend("eager"):
        *_, values, from_graphs = train(None, options, tiles=4)
        breaks = list(torch._dynamo.utils.counters["graph_break"])
        *_, off, _ = train(None, {})
    return total_error(values, off), from_graphs, breaks


@vary("options", [KEPT], slow=[SHARDED])
def test_tiles_of_mlps(ranks, options):
    """Only the first tile's gradient would be reduced, or Dynamo would compile what saves handles of parameters."""
    for error, from_graphs, breaks in ranks(world_of(options)).run(train_tiled, options):
        assert error < BOUND and from_graphs > 0
        assert not any("UntypedStorage" in text for text in breaks), breaks


def train_with_loss_in_tiles(options, backend):
    with compile_backend(backend):
        *_, values, from_graphs = train(None, options, kind=LossInTiles)
        *_, off, _ = train(None, {})
    return total_error(values, off), from_graphs


@vary("options, backend", [(KEPT, "eager")], slow=[(SHARDED, "eager"), (SHARDED, "inductor")])
def test_loss_in_tiles(ranks, options, backend):
    """Only the last tile's gradient of the head would be reduced, or that of the layers would be lost."""
    for error, from_graphs in ranks(world_of(options)).run(train_with_loss_in_tiles, options, backend):
        assert error < BOUND and from_graphs > 0


def test_a_loss_in_tiles_lets_its_input_go():
    """The hidden states of all tokens would stay through the backward of all layers, until the loss is dropped."""
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.randn(1, 8, WIDTH, requires_grad=True)
    wanted = torch.autograd.grad(head(hidden).sum(), hidden)[0]
    copied = hidden.clone()
    memory = StorageWeakRef(copied.untyped_storage())
    loss = sequence_tiled_compute(
        lambda x: head(x).sum(), 8, 4, {"x": copied}, {}, "x", [*head.parameters()], 0, output_reduction="sum"
    )
    del copied
    loss.backward(retain_graph=True)
    assert not memory.expired() and torch.allclose(hidden.grad, wanted)
    loss.backward()
    assert memory.expired() and torch.allclose(hidden.grad, 2 * wanted)


def test_the_example_replaces_no_other_loss():
    """A model whose logits are capped would train on another loss, and tiles that are unequal lose gradients."""
    transformers = pytest.importorskip("transformers")
    tiles = runpy.run_path(str(EXAMPLES / "tiles.py"))
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes))
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        tiles["loss_in_tiles"](capped, 4)
    model, ids = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)), torch.arange(8).view(1, -1)
    own = model(input_ids=ids, labels=ids).loss
    tiles["loss_in_tiles"](model, 4)
    assert torch.allclose(model(input_ids=ids, labels=ids).loss, own)
    with pytest.raises(ValueError, match="7 tokens cannot be cut into 4 equal tiles"):
        model(input_ids=ids[:, :7], labels=ids[:, :7])
