# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Tests themselves load graphs of the backend "eager" that ranks have stored: ``support/graph_cache.py``."""

import dataclasses
import os
import pickle
import weakref
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch.fx import Graph, GraphModule
from torch.fx.graph import _BoxedCodeGen

from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module
from deepspeed.compile.zero_1_and_2.graph.partitioner import ReduceGradPartitioner

from support import graph_cache
from support.training import Case, train_beside_plain_loop

needs_cache = pytest.mark.skipif(not graph_cache.SUPPORTED, reason="this torch keeps only what Inductor has compiled")


class Compiled(NamedTuple):
    loaded: int  # graphs
    traced: int  # graphs that were stored then
    error: float  # of the parameters


def compile_again(folder):
    """Trains in the same process, and returns what came of each training by its name. None if nothing is stored."""
    if not (graph_cache.is_installed and functorch_config.enable_autograd_cache):
        return None
    from deepspeed.compile.features.activation_budget import feature as split_file

    case = Case(model="FillsPartition", steps=1)

    def train(case=case):
        counters.clear()
        error = train_beside_plain_loop(case).error
        seen = counters["aot_autograd"]
        return Compiled(seen["autograd_cache_hit"], seen["autograd_cache_saved"], error)

    results = {}
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder / str(dist.get_rank()))):
        results["first"], results["again"] = train(), train()
        with graph_cache.compiled_anew():
            results["anew"] = train()
        split = split_file.split_joint
        with mock.patch.object(split_file, "split_joint", lambda *args, **kwargs: split(*args, **kwargs)):
            results["function replaced"] = train()
        results["graphs logged"] = train(dataclasses.replace(case, config={"compile": {"debug_log": True}}))
        budget = {"compile": {"activation_memory_budget": 0.5}}
        results["other partitioner"] = train(dataclasses.replace(case, config=budget))
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder / "of both ranks")):
        results["together"] = train()
    return results


@needs_cache
def test_ranks_load_what_they_have_stored(ranks, tmp_path):
    """Every rank would trace every graph, or a graph would be loaded that a test has changed or looks at."""
    both = ranks(2).run(compile_again, tmp_path)
    for results in both:
        if results is None:
            pytest.skip("a source was edited after the ranks started, or TORCHINDUCTOR_AUTOGRAD_CACHE is 0")
        assert all(result.error < 1e-5 for result in results.values())
        loaded = {name for name, result in results.items() if result.loaded}
        traced = {name for name, result in results.items() if result.traced}
        assert (loaded - {"together"}, traced - {"together"}) == ({"again"}, {"first", "other partitioner"}), results
    # Ranks with one cache trace each graph once, and the rank that came second has waited for it.
    graphs = both[0]["first"].traced
    assert (
        sum(results["together"].traced for results in both)
        == sum(results["together"].loaded for results in both)
        == graphs
    )


def partitioner(**changes):
    reducer_module()
    same = dict(positions={0: 1}, graph_id=0, release_reduce_buckets=False, debug_log=False)
    return ReduceGradPartitioner(**{**same, **changes})


def graph_of(function):
    return torch.fx.symbolic_trace(function)


def double(x):
    return torch.ops.aten.mul.Tensor(x, 2)


@pytest.mark.quick
def test_the_tag_has_the_partitioner_the_inputs_and_the_process_settings():
    """A graph would be loaded that was made for another place among the graphs, or for inputs that share memory."""
    from deepspeed.compile.features.activation_budget.feature import SplitWithin

    gm, rows = graph_of(double), torch.ones(2, 4)
    inputs = [rows[0], rows[1]]

    def tag(gm=gm, inputs=inputs, **changes):
        return graph_cache._tag(gm, inputs, partitioner(**changes))

    changes = [{"positions": {1: 1}}, {"positions": {0: 2}}]
    changes += [{"release_reduce_buckets": True}, {"split": SplitWithin(0.5)}]
    tags = [tag(), *(tag(**change) for change in changes)]
    tags += [
        tag(inputs=other) for other in ([rows[0], rows[0]], [rows[0], torch.ones(4)], [rows[0], torch.ones(4, 2)])
    ]
    with torch.autocast("cpu", torch.bfloat16):
        tags.append(tag())
    with torch.no_grad():
        tags.append(tag())
    assert None not in tags and len(set(tags)) == len(tags)
    assert tag() == tags[0]


@pytest.mark.quick
def test_no_graph_is_stored_that_no_key_covers():
    """The backward of somebody else's operator, or the values of a constant, could change under the same key."""

    def tag(function, inputs=()):
        return graph_cache._tag(graph_of(function), inputs, partitioner())

    class WithConstant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.constant = torch.ones(2)

        def forward(self, x):
            return x * self.constant

    assert tag(double) is not None
    assert tag(lambda x: torch.ops.deepcompile.reduce_grad(x, x, 1)) is None
    assert tag(WithConstant()) is None
    assert tag(torch.nn.Sequential(torch.nn.Linear(2, 2))) is None
    assert tag(double, [torch.nn.Buffer(torch.ones(2)).to_sparse()]) is None
    assert tag(double, [1.5]) is None


@pytest.mark.quick
def test_a_replaced_function_or_method_is_noticed():
    """A test would count no calls of what it has replaced, or store a graph that its replacement has made."""
    from deepspeed.compile.features.activation_budget import feature as split_file

    installed = graph_cache._names()
    assert not graph_cache._any_replaced(installed)
    replaced = ((split_file, "split_joint"), (ReduceGradPartitioner, "__call__"), (partitioners, "solve_min_cut"))
    for owner, name in replaced:
        with mock.patch.object(owner, name):
            assert graph_cache._any_replaced(installed)
    assert not graph_cache._any_replaced(installed)


def is_gone(tensor, references):
    """Called in a graph: notes whether its input still exists."""
    references.append(references[0]() is None)
    return tensor + 1


@pytest.mark.quick
def test_a_loaded_graph_drops_an_input_after_its_last_use():
    """Activations would live until the backward ends."""
    graph = Graph()
    x, references = graph.placeholder("x"), graph.placeholder("references")
    graph.output(graph.call_function(is_gone, (graph.call_function(torch.neg, (x,)), references)))
    gm = GraphModule(torch.nn.Module(), graph)
    graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    traced = graph_cache.StoredGraph(gm)
    loaded = pickle.loads(pickle.dumps(traced))
    for stored in (traced, loaded, pickle.loads(pickle.dumps(loaded))):
        inputs = [torch.ones(2)]
        references = [weakref.ref(inputs[0])]
        inputs.append(references)
        assert stored(inputs).tolist() == [0, 0] and inputs == []
        assert references[1:] == [True]
