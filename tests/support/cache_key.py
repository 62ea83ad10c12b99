# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The key that torch's caches would have for a graph if a source file was another one."""

from pathlib import Path
from unittest import mock

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


def key_of_a_graph(**parts):
    """Returns the key of a graph that optional parts split or rewrite."""
    reducer_module()
    return ReduceGradPartitioner({}, 0, False, False, **parts).uuid()


def check_key_of_a_part(name, **parts):
    """Asserts that the key of a graph that an optional part has shaped changes with the part's file of this name."""
    assert key_of_an_edited(name, lambda: key_of_a_graph(**parts)) != key_of_a_graph(**parts) != key_of_a_graph()
    # A graph that the part has not shaped stays in the caches.
    assert key_of_an_edited(name, key_of_a_graph) == key_of_a_graph()
