# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What shapes generated code. The key of torch's compile caches is a hash of this folder: ``backend.cache_key()``."""
