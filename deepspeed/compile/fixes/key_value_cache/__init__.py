# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains transformers' models without the cache of keys and values.

To transformers: a training forward fills a cache that nobody reads, unless gradient checkpointing is on. Under
``torch.compile`` each layer is compiled again, because it finds the cache filled by another number of layers. Please
leave the cache out in training mode where ``labels`` are given and the caller has not asked for it.
"""

# Parts without which this one does not work.
NEEDS = ("features.blocks",)
