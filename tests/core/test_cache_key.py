# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The keys of torch's caches change with the source that shapes generated code."""

import functools
from pathlib import Path
from unittest import mock

import pytest

from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module
from deepspeed.compile.zero_1_and_2.graph import keys
from deepspeed.compile.zero_1_and_2.graph.partitioner import ReduceGradPartitioner


def key_of_an_edited(name, key):
    """Returns the key that there would be if the source files of this name were edited."""
    read = Path.read_bytes
    caches = keys.hash_of_source, keys.cache_key
    for cache in caches:
        cache.cache_clear()
    try:
        with mock.patch.object(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == name)):
            return key()
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.quick
@pytest.mark.parametrize("name", ["reductions.py", "partitioner.py", "backend.py", "lowering.py", "native.py"])
def test_source_that_was_edited(name):
    """Generated code of the source before would be used, and would reduce as that source did."""
    assert key_of_an_edited(name, keys.cache_key) != keys.cache_key()


@pytest.mark.quick
def test_source_of_a_part_that_was_edited():
    """Generated code that was split, or rewritten, by the source before would be used."""
    from deepspeed.compile.features.activation_budget.split import SplitWithin
    from deepspeed.compile.features.shard_parameters.rewrite import SaveByHooks

    reducer_module()

    def key(**parts):
        return ReduceGradPartitioner({}, 0, False, False, [], **parts).uuid()

    for name, parts in (
        ("split.py", {"split": SplitWithin(0.5)}),
        ("rewrite.py", {"rewrites": [SaveByHooks((0,))]}),
    ):
        edited = functools.partial(key_of_an_edited, name)
        assert edited(functools.partial(key, **parts)) != key(**parts) != key()
        # A graph that the part has not shaped stays in the caches.
        assert edited(key) == key()
