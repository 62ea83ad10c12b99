# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How graphs of ``torch.compile`` get reductions. ``keys.cache_key()`` hashes this folder."""
