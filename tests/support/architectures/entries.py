# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How the entries of the table are made, and the settings that models of several kinds share."""

import copy
import functools
from typing import Any, Callable, Dict, NamedTuple

import torch

from support.architectures.batches import BOS, EOS, PAD, VOCABULARY

RANDOM = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")  # parts of the names of rates that are set to 0


class Architecture(NamedTuple):
    """A model with random weights, to be made after ``torch.manual_seed``, and what it is trained on."""

    kind: str
    make: Callable[[], torch.nn.Module]
    batch: Callable[[int, int], Dict[str, Any]]  # (seed, rows) -> arguments of forward, which returns a loss


def turn_random_off(config):
    """Turns dropout and its like off in a configuration, and in those inside of it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            turn_random_off(value)
        elif name == "apply_spec_augment":
            config.apply_spec_augment = False
        elif isinstance(value, float) and any(part in name for part in RANDOM):
            setattr(config, name, 0.0)


def build(model, settings):
    import transformers

    model = getattr(transformers, model)
    config = model.config_class(**copy.deepcopy(settings))  # which may change what it is given
    turn_random_off(config)
    return model(config)


def architectures(kind, batch, head, common, table):
    """Entries for a table of settings that each model has beside or instead of the common ones.

    The model's class is the name with the head, unless the settings have another one under "model"; so with "batch".
    """
    entries = {}
    for name, own in table.items():
        settings = {**common, **own}
        model = settings.pop("model", name + head)
        entries[name] = Architecture(kind, functools.partial(build, model, settings), settings.pop("batch", batch))
    return entries


# Settings that several kinds share. Dicts of dicts only keep the lines few.
SPECIAL = dict(vocab_size=VOCABULARY, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
LANGUAGE = dict(**SPECIAL, **SIZES, num_key_value_heads=2, max_position_embeddings=64)
ENCODER_DECODER = dict(
    **dict(SPECIAL, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64),
    **dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64, decoder_start_token_id=EOS),
)
