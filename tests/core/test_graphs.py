# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the passes do to graphs: small ones written here, and those of real models."""

from typing import List, NamedTuple
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.compile.zero_1_and_2.graph.partitioner import ReduceGradPartitioner
from deepspeed.compile.zero_1_and_2.graph.reductions import finish_backward_graph

from support.ids import vary
from support.on_ranks import on_ranks
from support.training import Case, batch, build, make_engine


@pytest.fixture(scope="module")
def fx():
    from deepspeed.compile import fx
    from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

    reducer_module()
    return fx


def backward_graph(reductions):
    """A backward graph with a gradient for each reduction, which come in the reverse order of their positions."""
    graph = Graph()
    registrations, outputs = graph.placeholder("registrations"), []
    for index in reversed(range(reductions)):
        tangent = graph.placeholder(f"t{index}")
        gradient = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, 2))
        reduce_grad = torch.ops.deepcompile.reduce_grad.default
        outputs.append(graph.call_function(reduce_grad, (gradient, registrations, 1 + index)))
    outputs.append(graph.placeholder("activation_gradient"))
    graph.output(tuple(outputs))
    return GraphModule(torch.nn.Module(), graph)


def calls(graph):
    return [(node.name, str(node.target), node.args) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.quick
def test_end_backward_stands_after_every_reduction(fx):
    """The backward would end before its last reduction, or keep the reduced gradients as outputs."""
    backward = backward_graph(2)
    finish_backward_graph(backward, release_reduce_buckets=True)
    *_, (_, target, arguments) = calls(backward.graph)
    assert target == "deepcompile.end_backward.default"
    assert str(arguments) == "([reduce_grad_default, reduce_grad_default_1, registrations], True)"
    assert str(backward.graph.output_node().args[0]) == "(None, None, activation_gradient)"


def test_an_input_may_be_called_output(fx):
    """The output node would be looked up by its name, and an input of that name be found, by ZeRO-3's end too."""
    from deepspeed.compile import fx_base

    graph = Graph()
    graph.output((graph.placeholder("output"),))
    assert fx.get_output_node(graph).op == fx_base.get_output_node(graph).op == "output"


def test_the_base_ends_its_zero3_backward_with_its_own_operator(fx):
    """ZeRO-3 of the base, which shares ``fx.py``, would end its backward with this fork's operator."""
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
def test_release_goes_to_the_first_graph_that_reduces(fx):
    """Buckets would be released by a graph after which others still reduce, or by none."""
    order = [(0, False), (1, True), (2, True)]
    assert [fx.should_release_reduce_buckets(order, graph_id) for graph_id, _ in order] == [False, True, False]
    assert fx.should_release_reduce_buckets([(0, False)], 0)


@pytest.mark.parametrize("first_trains", [True, False])
def test_zero3_release_skips_graphs_without_trainable_parameters(fx, first_trains):
    """In ZeRO-3 the release would go to a graph of frozen parameters, which has no backward."""
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


class End(NamedTuple):
    """A call of ``end_backward`` in a backward graph."""

    reductions: int  # that it stands behind
    releases: bool


class BackwardGraph(NamedTuple):
    """What the nodes of a backward graph do."""

    graph_id: int
    reductions: int
    ends: List[End]
    hidden: bool  # whether all reduced gradients are hidden from autograd


@pytest.mark.core
@vary("backend", ["eager"], slow=["inductor"])
@vary(
    "model, first_graph_reduces",
    [
        ("OneGraph", True),
        ("SeveralGraphs", True),
        ("NoParametersFirst", True),  # which has no backward at all
        ("NoParametersFirstButGrad", False),
        ("NoParametersLast", True),
    ],
    expects="first_graph_reduces",
)
@on_ranks(1)
def test_end_backward_releases_once(backend, model, first_graph_reduces):
    """A model of several graphs would release its buckets in none of them, in two, or in one that is not the last."""
    case = Case(model=model, backend=backend)
    graphs, buckets = [], []
    split = ReduceGradPartitioner.__call__

    def recording(self, *args, **kwargs):
        forward, backward = split(self, *args, **kwargs)
        nodes = list(backward.graph.nodes)
        reductions = [n for n in nodes if n.target == torch.ops.deepcompile.reduce_grad.default]
        ends = [n for n in nodes if n.target == torch.ops.deepcompile.end_backward.default]
        outputs = next(n for n in nodes if n.op == "output").args[0]
        graphs.append(
            BackwardGraph(
                self.graph_id,
                len(reductions),
                [End(len(n.args[0]) - 1, n.args[1]) for n in ends],
                hidden=not any(n in reductions for n in outputs),
            )
        )
        return forward, backward

    with (
        mock.patch.object(ReduceGradPartitioner, "__call__", recording),
        # A graph that torch had kept would not be made here. The machine code of its kernels may come from where it
        # likes.
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        engine = make_engine(build(case), case)
        for step in range(2):
            engine.backward(engine(batch(step, 0, dist.get_rank(), 4)))
            buckets.append(gradient_counters(engine)["bucket"])
            engine.step()
        engine.destroy()
    assert (graphs[0].reductions > 0) == first_graph_reduces, graphs
    reducing = [graph for graph in graphs if graph.reductions]
    ends = [end for graph in graphs for end in graph.ends]
    releasing = [graph for graph in graphs if graph.ends]
    assert len(releasing) == 1, graphs
    assert ends == [End(releasing[0].reductions, releases=True)]
    # Frames are compiled in forward order, so the first that reduces is the last to run backward.
    assert releasing[0].graph_id == min(graph.graph_id for graph in reducing)
    assert all(graph.hidden for graph in graphs)
    assert buckets == [0, 0]


@on_ranks(1)
def test_a_second_compilation_comes_from_torchs_caches():
    """A part of the cache's key would differ in each compilation, or a graph of the cache would reduce nothing."""
    case, reduced = Case(backend="inductor", model="RepeatedLayers"), []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        engine = make_engine(build(case), case)
        engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
        reduced.append(gradient_counters(engine)["from_graphs"])
        engine.step()
        engine.destroy()
    assert reduced[1] == reduced[0] > 0
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    assert aot["autograd_cache_hit"] > 0 or inductor["fxgraph_cache_hit"] > 0, counters
    assert aot["autograd_cache_miss"] == 0 and inductor["fxgraph_cache_miss"] == 0, counters
