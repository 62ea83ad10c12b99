# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Puts reductions into graphs of ``torch.compile``. ``keys.cache_key()`` hashes this folder."""
