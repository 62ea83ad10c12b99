# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""All code that shapes generated code. ``backend.cache_key()`` hashes it for the keys of torch's caches."""
