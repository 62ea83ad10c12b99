# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the passes do to graphs: small ones written here, and those of real models."""

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

from support.graphs import backward_graphs, cached_again
from support.training import Case


@pytest.fixture(scope="module")
def fx():
    from deepspeed.compile import fx
    from deepspeed.compile.zero12.native import reducer_module

    reducer_module()
    return fx


def backward_graph(reductions):
    """A backward graph with a gradient for each reduction, which come in the reverse order of their slots."""
    graph = Graph()
    registrations, outputs = graph.placeholder("registrations"), []
    for index in reversed(range(reductions)):
        tangent = graph.placeholder(f"t{index}")
        gradient = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, 2))
        reduce_grad = torch.ops.deepcompile.reduce_grad.default
        outputs.append(graph.call_function(reduce_grad, (gradient, registrations, 1 + index)))
    outputs.append(graph.placeholder("activation_gradient"))
    graph.output(tuple(outputs))
    return graph


def calls(graph):
    return [(node.name, str(node.target), node.args) for node in graph.nodes if node.op == "call_function"]


def test_end_backward_stands_behind_every_reduction(fx):
    graph = backward_graph(2)
    fx.add_end_backward(graph, 7, release_reduce_buckets=True)
    fx.replace_reduce_outputs_with_none(graph)
    graph.lint()
    *_, (_, target, arguments) = calls(graph)
    assert target == "deepcompile.end_backward.default"
    assert str(arguments) == "([reduce_grad_default, reduce_grad_default_1, registrations], 7, True)"
    assert str(fx.get_output_node(graph).args[0]) == "(None, None, activation_gradient)"


def test_reductions_follow_their_slots(fx):
    from deepspeed.compile.zero12.graph.reductions import finish_backward_graph

    module = GraphModule(torch.nn.Module(), backward_graph(3))
    finish_backward_graph(module, 0, True)
    reductions = fx.reduce_nodes(module.graph)
    assert [node.args[2] for node in reductions] == [1, 2, 3]
    assert [node.args[3:] for node in reductions] == [(), (reductions[0],), (reductions[1],)]


def test_the_base_ends_its_zero3_backward_with_its_own_operator(fx):
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


def test_a_graph_that_reduces_nothing_gets_no_end(fx):
    graph = backward_graph(0)
    before = str(graph)
    fx.add_end_backward(graph, 0)
    fx.replace_reduce_outputs_with_none(graph)
    assert str(graph) == before


def test_release_goes_to_the_first_graph_that_reduces(fx):
    order = [(0, False), (1, True), (2, True)]
    assert [fx.should_release_reduce_buckets(order, graph_id) for graph_id, _ in order] == [False, True, False]
    assert fx.should_release_reduce_buckets([(0, False)], 0)


@pytest.mark.parametrize("first_trains", [True, False])
def test_zero3_release_skips_graphs_without_trainable_parameters(fx, first_trains):
    from types import SimpleNamespace

    from deepspeed.compile import backend

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


def test_rewriting_helpers(fx):
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


@pytest.mark.parametrize(
    "model, first_graph_reduces",
    [
        ("OneGraph", True),
        ("SeveralGraphs", True),
        ("NoParametersFirst", True),  # which has no backward at all
        ("NoParametersFirstButGrad", False),
        ("NoParametersLast", True),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_end_backward_releases_once(ranks, backend, model, first_graph_reduces):
    for entries, buckets in ranks(2).run(backward_graphs, Case(model=model, backend=backend)):
        assert (entries[0][2] > 0) == first_graph_reduces, entries
        reducing = [entry for entry in entries if entry[2]]
        ends = [end for entry in entries for end in entry[3]]
        assert [count for _, _, count, *_ in entries if count] == [count for count, _, _ in ends]
        releasing = [entry for entry in entries if any(flag for _, _, flag in entry[3])]
        assert len(releasing) == 1, entries
        # Frames are compiled in forward order, so the first that reduces is the last to run backward.
        assert releasing[0][0] == min(entry[0] for entry in reducing)
        assert all(chained and hidden for *_, chained, hidden in entries)
        assert buckets == [0, 0]


def test_a_second_compilation_comes_from_torchs_caches(ranks):
    case = Case(backend="inductor", model="SeveralGraphs")
    for first, second in ranks(2).run(cached_again, case):
        inductor, aot, reduced = second
        assert reduced == first[2] > 0
        assert aot.get("autograd_cache_hit", 0) > 0 or inductor.get("fxgraph_cache_hit", 0) > 0, second
        assert aot.get("autograd_cache_miss", 0) == 0 and inductor.get("fxgraph_cache_miss", 0) == 0, second
