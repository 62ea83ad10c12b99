# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Rewritten graphs in torch's caches."""

import pytest

from deepspeed.compile.features.shard_parameters.rewrite import SaveByHooks

from support.cache_key import check_key_of_a_part


@pytest.mark.quick
def test_source_that_was_edited():
    """Generated code that was rewritten by the source before would be used."""
    check_key_of_a_part("rewrite.py", rewrites=[SaveByHooks((0,))])
