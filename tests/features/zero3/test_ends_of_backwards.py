# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The base's helpers on FX graphs, of which its passes of ZeRO-3, AutoSP and AutoTP are made."""

import operator
from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph, GraphModule

from deepspeed.compile import backend, fx


def calls(graph):
    return [(node.name, str(node.target), node.args) for node in graph.nodes if node.op == "call_function"]


def test_an_input_may_be_called_output():
    """The output node would be looked up by its name, and an input of that name be found."""
    graph = Graph()
    graph.output((graph.placeholder("output"),))
    assert fx.get_output_node(graph).op == "output"


def test_the_base_ends_its_zero3_backward_with_its_own_operator():
    """ZeRO-3 of the base would end its backward with this fork's operator."""
    # The operators of the base's native module need CUDA; their schemas suffice here.
    library = None
    if not hasattr(torch.ops.dc, "reduce_grad"):
        library = torch.library.Library("dc", "DEF")
        library.define("reduce_grad(Tensor a, int graph_id, int id) -> Tensor")
        library.define("end_backward(Any deps, int graph_id, bool release_reduce_buckets) -> ()")
    graph = Graph()
    gradient = graph.placeholder("gradient")
    reduction = graph.call_function(torch.ops.dc.reduce_grad.default, (gradient, 140153513234304, 3))
    graph.output((reduction,))
    fx.add_end_backward(graph, 140153513234304, release_reduce_buckets=False)
    fx.replace_reduce_outputs_with_none(graph)
    *_, (_, target, arguments) = calls(graph)
    assert target == "dc.end_backward.default"
    assert arguments == ([reduction], 140153513234304, False)
    assert fx.get_output_node(graph).args[0] == (None,)
    del library


@pytest.mark.quick
def test_release_goes_to_the_first_graph_that_reduces():
    """Buckets would be released by a graph after which others still reduce, or by none."""
    order = [(0, False), (1, True), (2, True)]
    assert [fx.should_release_reduce_buckets(order, graph_id) for graph_id, _ in order] == [False, True, False]
    assert fx.should_release_reduce_buckets([(0, False)], 0)


@pytest.mark.parametrize("first_trains", [True, False])
def test_zero3_release_skips_graphs_without_trainable_parameters(first_trains):
    """In ZeRO-3 the release would go to a graph of frozen parameters, which has no backward."""

    def graph_with(*parameters):
        return SimpleNamespace(params={str(i): SimpleNamespace(param=p) for i, p in enumerate(parameters)})

    trainable, frozen = torch.ones(1, requires_grad=True), torch.ones(1)
    backend.param_manager.update(
        {"first": graph_with(*([trainable] if first_trains else [frozen])), "second": graph_with(trainable, frozen)}
    )
    try:
        order = [("first", True), ("second", True)]
        assert fx.should_release_reduce_buckets(order, "first") == first_trains
        assert fx.should_release_reduce_buckets(order, "second") != first_trains
    finally:
        backend.param_manager.clear()


def test_rewriting_helpers():
    """A helper would put a node before its input, drop its meta data, or leave users at the node that it replaces."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(operator.add, (x, y))
    late = graph.placeholder("late")
    graph.output(graph.call_function(operator.mul, (total, late)))
    graph = fx.move_primals_to_head(graph)
    assert [node.op for node in graph.nodes][:3] == ["placeholder"] * 3
    total = next(node for node in graph.nodes if node.target is operator.add)
    doubled = fx.add_postprocess(graph, total, operator.mul, extra_args=[2], name="doubled", meta={"comm": True})
    negated = fx.add_args_process(graph, total, operator.sub, extra_args=[1], meta={"ds_id": 3})
    assert doubled.meta["comm"] and all(node.meta["ds_id"] == 3 for node in negated)
    module = GraphModule(torch.nn.Module(), graph)
    assert fx.find_node_by_name(module, "doubled") is doubled and fx.find_node_by_name(module, "none") is None
    # ((x - 1) + (y - 1)) * 2 * late
    assert module(5, 7, 10) == 200
    graph.lint()
