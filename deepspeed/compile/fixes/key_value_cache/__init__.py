# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes training forwards of transformers' models run without the cache of keys and values."""

# Parts without which this one does not work.
NEEDS = ("features.blocks",)
