# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""MLPs and losses in tiles of tokens, for long sequences: ``finetune.py`` uses them with ``--tiles``."""

import torch
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, sequence_tiled_compute


def mlps_in_tiles(model, tiles):
    """Gives the MLPs of a model of transformers a forward in tiles. The backward computes each tile again."""
    for layer in model.model.layers:
        whole = type(layer.mlp)
        if whole.forward.__name__ != "forward_in_tiles":

            def forward_in_tiles(self, x, whole_forward=whole.forward):
                return TiledMLP.apply(whole_forward, self, x, tiles, list(self.parameters()))

            whole.forward = forward_in_tiles


def loss_in_tiles(model, tiles):
    """Makes a language model return its loss alone, of which no more logits exist than those of a tile."""

    def of_tile(hidden, targets):
        logits = model.lm_head(hidden).flatten(0, 1).float()
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")

    @torch.compiler.disable
    def summed(hidden, targets):
        return sequence_tiled_compute(
            of_tile,
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
        # Each token predicts the next one.
        targets = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return CausalLMOutput(loss=summed(hidden, targets) / (targets != -100).sum())

    model.forward = forward
