# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What makes room for long sequences in models of ``workload.py``: inputs on the host, MLPs and losses in tiles."""

import functools

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # the target of a token that has none


def save_inputs_on_host(model: torch.nn.Module) -> None:
    """Makes torch keep what checkpointed layers save on the host, as transformers' ``offload=True`` does.

    Args:
        model: whose layers are checkpointed.
    """
    pinned = next(model.parameters()).device.type == "cuda"

    def run(function, *inputs):
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            return checkpoint(function, *inputs, use_reentrant=False)

    for layer in model.model.layers:
        layer._gradient_checkpointing_func = run


def tile_mlps(model: torch.nn.Module, tiles: int) -> None:
    """Makes DeepSpeed compute the MLPs of a model in so many tiles of tokens, in the forward and in the backward."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    whole = type(model.model.layers[0].mlp)

    class Tiled(whole):
        def forward(self, x):
            return TiledMLP.apply(whole.forward, self, x, tiles, list(self.parameters()))

    for layer in model.model.layers:
        layer.mlp.__class__ = Tiled


def tile_loss(model: torch.nn.Module, tiles: int, by_deepspeed: bool) -> None:
    """Makes a model compute its head and its loss in so many tiles of tokens, so that no logits exist as a whole.

    Args:
        model: a causal language model, whose forward then returns only the loss.
        by_deepspeed: whether DeepSpeed's function cuts the tokens, which ZeRO needs. Otherwise each tile is
            checkpointed.
    """
    from transformers.modeling_outputs import CausalLMOutput

    whole = type(model)

    class Tiled(whole):
        def forward(self, input_ids, labels):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
            total = (_by_deepspeed if by_deepspeed else _checkpointed)(hidden, targets, self.lm_head, tiles)
            return CausalLMOutput(loss=total / (targets != IGNORED).sum())

    model.__class__ = Tiled


def _sum_of_losses(logits, targets):
    """Returns the sum of the losses of a tile, a tensor [].

    Args:
        logits: [sequences, tokens, vocabulary].
        targets: the token that follows each, int64 [sequences, tokens].
    """
    logits = logits.flatten(0, 1).float()
    return cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


@functools.cache
def _compiled():
    return torch.compile(lambda x, y, weight: _sum_of_losses(linear(x, weight), y), dynamic=False)


def _checkpointed(hidden, targets, head, tiles):
    parts = zip(hidden.chunk(tiles, 1), targets.chunk(tiles, 1))
    # FSDP2 would gather the head again with each of its calls.
    return sum(checkpoint(_compiled(), x, y, head.weight, use_reentrant=False) for x, y in parts)


@torch.compiler.disable(reason="its backward runs other backwards")
def _by_deepspeed(hidden, targets, head, tiles):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    return sequence_tiled_compute(
        lambda x, y: _compiled()(x, y, head.weight),
        hidden.shape[1],
        tiles,
        {"x": hidden, "y": targets},
        {},
        "x",
        list(head.parameters()),
        output_unshard_dimension=0,
        output_reduction="sum",
    )
