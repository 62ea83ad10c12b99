# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The keys of torch's caches change with the source that shapes generated code."""

from types import SimpleNamespace

import pytest

from deepspeed.compile.zero_1_and_2.graph import keys

from support.cache_key import key_of_a_graph, key_of_an_edited


@pytest.mark.quick
@pytest.mark.parametrize("name", ["reductions.py", "partitioner.py", "backend.py", "lowering.py", "native.py"])
def test_source_that_was_edited(name):
    """Generated code of the source before would be used, and would reduce as that source did."""
    assert key_of_an_edited(name, keys.cache_key) != keys.cache_key()


@pytest.mark.quick
def test_a_graph_that_a_part_has_shaped():
    """A graph would come from the caches that a part has split, or rewritten, in another way."""
    made = SimpleNamespace(key="a"), SimpleNamespace(key="b")
    found = [{"split": change} for change in made] + [{"rewrites": [change]} for change in made]
    assert len({key_of_a_graph(), *(key_of_a_graph(**parts) for parts in found)}) == 5
