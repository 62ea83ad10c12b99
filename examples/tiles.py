# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""MLPs and losses in tiles of tokens, for long sequences: ``finetune.py`` uses them with ``--loss-tiles`` and
``--mlp-tiles``."""

import torch
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, sequence_tiled_compute

# With these in its configuration a model's loss is not the cross-entropy of the head's output.
OTHER_LOSSES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_router_logits")


def mlps_in_tiles(model, tiles):
    """Gives the MLPs of a model of transformers a forward in tiles. The backward computes each tile again."""
    # One class for all layers: a class of its own for each would be compiled for each.
    kinds = {}
    for layer in model.model.layers:
        whole = type(layer.mlp)
        if whole not in kinds:
            kinds[whole] = type(f"Tiled{whole.__name__}", (whole,), {"forward": _in_tiles(whole.forward, tiles)})
        layer.mlp.__class__ = kinds[whole]


def _in_tiles(whole_forward, tiles):
    def forward(self, x):
        _require_whole_tiles(x.shape[1], tiles)
        return TiledMLP.apply(whole_forward, self, x, tiles, list(self.parameters()))

    return forward


def loss_in_tiles(model, tiles):
    """Makes a language model return its loss alone, of which no more logits exist than those of a tile.

    The loss is the cross-entropy of the head's logits. A model whose own loss is another one, with logits that are
    capped or a router's loss, is refused.
    """
    others = [name for name in OTHER_LOSSES if getattr(model.config, name, None) not in (None, False, 1)]
    if others:
        raise ValueError(
            f"the model's loss depends on its {others[0]}, which a loss in tiles leaves out; train without tiles of it"
        )
    ids = torch.arange(2 * tiles, device=model.device).view(1, -1) % model.config.vocab_size
    is_training = model.training
    model.eval()
    with torch.no_grad():
        own = model(input_ids=ids, labels=ids).loss

    def of_tile(hidden, targets):
        logits = model.lm_head(hidden).flatten(0, 1).float()
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")

    # Compiled, logits are not read and written by each operator. The function that cuts tokens cannot be compiled.
    compiled_tile = torch.compile(of_tile)

    @torch.compiler.disable
    def summed(hidden, targets):
        return sequence_tiled_compute(
            compiled_tile,
            hidden.shape[1],
            tiles,
            {"hidden": hidden, "targets": targets},
            {},
            "hidden",
            list(model.lm_head.parameters()),
            output_unshard_dimension=0,
            output_reduction="sum",
        )

    def forward(labels, **batch):
        hidden = model.model(**batch).last_hidden_state
        _require_whole_tiles(hidden.shape[1], tiles)
        # Each token predicts the next one.
        targets = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return CausalLMOutput(loss=summed(hidden, targets) / (targets != -100).sum())

    model.forward = forward
    # Uncompiled: else training's length would be the second that torch sees, and torch would compile for any length.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        in_tiles = model(input_ids=ids, labels=ids).loss
    model.train(is_training)
    # With --shard the first rank alone has the model's values.
    if not own.is_meta and not torch.allclose(own.float(), in_tiles.float(), rtol=0.02):
        raise ValueError(
            f"the loss in tiles, {in_tiles:.4f}, is not the model's own, {own:.4f}; train without tiles of it"
        )


def _require_whole_tiles(tokens, tiles):
    # With fewer tiles than it counts, DeepSpeed without DeepCompile would never reduce the gradients.
    if tokens % tiles:
        raise ValueError(f"{tokens} tokens cannot be cut into {tiles} equal tiles; choose a divisor")
