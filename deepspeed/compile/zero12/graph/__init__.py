# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""All code that shapes generated code. ``backend.cache_key()`` hashes this folder for the keys of torch's caches."""
