# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Contexts of the caller around the first forward of an engine that shards its parameters, and transforms of it."""

from support.contexts import ALL, TRANSFORMS, first_call, same
from support.ids import vary
from support.on_ranks import on_ranks

SHARDED = {"deepcompile": True, "shard_parameters": "all"}
# Parameters cannot be gathered within these: the call says so.
REFUSED = ["fake", *(name for name in TRANSFORMS if name != "vmap")]


def compare(name):
    plain, sharded = first_call(name, {"deepcompile": False}), first_call(name, SHARDED)
    return plain, sharded, same(plain, sharded)


@vary("name", [name for name in ALL if name not in REFUSED])
@on_ranks(2)
def test_a_context_around_the_first_forward(name):
    """Hooks of a caller would pass for a torch without hooks, or units be made within what the caller has opened."""
    plain, sharded, is_same = compare(name)
    assert sharded.raised == plain.raised and is_same and sharded.is_compiled


@vary("name", REFUSED)
@on_ranks(2)
def test_what_parameters_cannot_be_gathered_within(name):
    """Parameters would be gathered to garbage, which trains, or an error would name a storage of torch's."""
    plain, sharded, _ = compare(name)
    assert "compile.shard_parameters cannot gather parameters within FakeTensorMode or a transform" in sharded.raised
    # The steps after it.
    assert same(plain._replace(result=None), sharded)
