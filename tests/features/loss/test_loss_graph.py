# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A loss computed from large tensors that the model returns is a graph of its own, with the same gradients."""

import contextlib
import operator
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

from deepspeed.compile.features.loss import own_graph as loss_graph
from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.beside import Beside
from support.chunked_loss import profiled_backward
from support.ids import vary
from support.models import VOCABULARY
from support.on_ranks import on_ranks
from support.training import BOUND, Case, batch, build, device, make_engine

SMALL = 1
WHOLE = {"compile": {"regional_compilation": False}}


@contextlib.contextmanager
def large_from(numel):
    """Takes tensors from so many elements on for large. Yields a list with an entry for each graph that is cut."""
    cuts, split = [], loss_graph.split_loss

    def recording(*args):
        result = split(*args)
        if result is not None:
            cuts.append(result)
        return result

    with mock.patch.multiple(loss_graph, split_loss=recording, LARGE_NUMEL=numel):
        yield cuts


def step_loss(outputs, uses_logits):
    loss, logits = outputs
    return loss + logits.square().mean() if uses_logits else loss


class WithLogits(NamedTuple):
    cuts: int  # graphs that were cut
    from_graphs: int  # gradients that graphs reduced
    error: float  # of the parameters


def train(case, large, lengths, uses_logits=False):
    """Trains a step with each of ``lengths`` where tensors from ``large`` elements on are large."""
    pair = Beside(build(case), case)
    with large_from(large) as cuts:
        for step, length in enumerate(lengths):
            ids = batch(step, 0, dist.get_rank(), length)
            # In every second step only, so that the same graph sees both.
            used = uses_logits and step % 2 == 1
            pair.engine.backward(step_loss(pair.engine(ids), used))
            pair.engine.step()
            step_loss(pair.plain(ids), used).backward()
            pair.step_plain()
    from_graphs = gradient_counters(pair.engine)["from_graphs"]
    return WithLogits(len(cuts), from_graphs, pair.end().error)


@vary("uses_logits", [False, True])
@vary("config, lengths", [(None, [4, 4, 5, 5]), (WHOLE, [4, 4])], expects="lengths")
@vary("stage, backend", [pytest.param(1, "inductor", marks=pytest.mark.slow), (2, "eager")])
def test_cut_at_the_loss_it_trains_as_a_plain_loop(ranks, stage, backend, config, lengths, uses_logits):
    """The gradient that the caller gives the returned logits would be lost, or reach the parameters twice."""
    case = Case(model="ReturnsLogits", stage=stage, backend=backend, config=config)
    (result,) = ranks(1).run(train, case, SMALL, lengths, uses_logits)
    assert result.cuts == len({*lengths})
    # In each step all that is compiled: without the embedding, unless the whole model is.
    assert result.from_graphs == len(lengths) * (20 if config else 19)
    assert result.error < BOUND


def large_allocations(case, numel, frozen_head=False):
    """How often a backward allocates as much as the logits take."""
    module = build(case)
    module.head.requires_grad_(not frozen_head)
    with large_from(numel):
        engine = make_engine(module, case)
        for _ in range(2):
            ids = torch.zeros(2, 4000, dtype=torch.long, device=device())
            size, profiler = profiled_backward(engine, ids)
            engine.step()
    engine.destroy()
    events = profiler.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and size <= event.nbytes() < size + 1024 for event in events)


@vary("config, frozen_head", [(None, False), (None, True)], slow=[(WHOLE, False)])
def test_no_zeros_for_what_is_only_returned(ranks, config, frozen_head):
    """A backward would allocate zeros as large as the logits for a gradient that nobody gives.

    A frozen head, as with LoRA, leaves the graph of the loss without a trained parameter.
    """
    case = Case(model="ReturnsLogits", backend="inductor", config=config)
    # The gradient of the logits; and zeros, which the caller might have put something into.
    assert ranks(1).run(large_allocations, case, SMALL, frozen_head) == [1]
    assert ranks(1).run(large_allocations, case, 10**9, frozen_head) == [2]


@vary("model, cuts", [("HookedBehindLogits", [0, 0]), ("ReturnsLogits", [0, 1])], expects="cuts")
@on_ranks(2)
def test_ranks_of_different_lengths(model, cuts):
    """A rank that cuts its graph would reduce a hooked parameter behind the logits in another place than one that
    does not, or would send its buckets in another order."""
    rank = dist.get_rank()
    # Only the second rank's logits are large.
    result = train(Case(model=model, bucket=40), 2 * 8 * VOCABULARY, [4 + 4 * rank] * 2)
    assert result.cuts == cuts[rank] and result.error < BOUND


# What is cut --------------------------------------------------------------------------------------------------------


ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


class Traced:
    """A graph as Dynamo makes it: x @ weight, which is returned, and a loss."""

    def __init__(self):
        self.graph = Graph()
        self.inputs = [torch.ones(2, 3), torch.nn.Parameter(torch.ones(3, 4))]
        self.x, self.weight = self.graph.placeholder("L_x_"), self.graph.placeholder("L_weight_")
        for node, value in zip((self.x, self.weight), self.inputs):
            node.meta["example_value"] = value
        self.logits = self.graph.call_function(operator.matmul, (self.x, self.weight))
        self.logits.meta["example_value"] = self.inputs[0] @ self.inputs[1]

    def loss_of(self, node):
        loss = self.graph.call_method("sum", (node,))
        loss.meta["example_value"] = torch.ones((), requires_grad=True)
        return loss

    def cut(self, *outputs):
        self.graph.output(outputs)
        self.graph_module = GraphModule(torch.nn.Module(), self.graph)
        with large_from(8):
            return loss_graph.split_loss(self.graph_module, (False, True))


def targets(graph_module):
    return [node.target for node in graph_module.graph.nodes if node.op.startswith("call")]


@pytest.mark.quick
def test_cut_after_what_is_returned():
    """The loss would stay in the graph of the logits, or the two halves would compute something else."""
    traced = Traced()
    split = traced.cut(traced.loss_of(traced.logits), traced.logits)
    assert (targets(split.submod_0), targets(split.submod_1)) == ([operator.matmul], ["sum"])
    head_inputs = loss_graph.inputs_of_head(split, traced.inputs)
    assert len(head_inputs) == 2 and head_inputs[1] is traced.inputs[1]
    seen = []

    def compile_graph(head):
        seen.append(head.graph.find_nodes(op="output")[0].args[0])
        return head

    loss_graph.replace(split, loss_graph.HEAD, compile_graph)
    assert isinstance(seen[0], tuple), "compilers want a tuple"
    for actual, expected in zip(split(*traced.inputs), traced.graph_module(*traced.inputs), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.quick
def test_cut_before_an_autocast_region():
    """A cut within a region would leave it open in the first half."""
    traced = Traced()
    begin = traced.graph.call_function(ENTER, ("cpu", torch.bfloat16, True, None))
    loss = traced.loss_of(traced.logits)
    traced.graph.call_function(EXIT, (begin,))
    split = traced.cut(loss, traced.logits)
    assert targets(split.submod_0) == [operator.matmul]


def returned_alone(traced):
    return (traced.logits,)


def not_returned(traced):
    return (traced.loss_of(traced.logits),)


def no_loss(traced):
    return traced.graph.call_method("tanh", (traced.logits,)), traced.logits


def parameter_behind(traced):
    return traced.loss_of(traced.graph.call_function(operator.add, (traced.logits, traced.weight))), traced.logits


def within_autocast(traced):
    loss = traced.loss_of(traced.logits)
    with traced.graph.inserting_before(traced.logits):
        begin = traced.graph.call_function(
            torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None)
        )
    traced.graph.call_function(EXIT, (begin,))
    return loss, traced.logits


def without_gradient(traced):
    traced.logits.meta["example_value"] = traced.logits.meta["example_value"].detach()
    return traced.loss_of(traced.logits), traced.logits


def changed_in_place(traced):
    traced.logits.meta["example_value"].mul_(2)
    return traced.loss_of(traced.logits), traced.logits


def method_in_place(traced):
    traced.graph.call_method("add_", (traced.x, 1))
    return traced.loss_of(traced.logits), traced.logits


def operator_in_place(traced):
    traced.graph.call_function(operator.iadd, (traced.x, 1))
    return traced.loss_of(traced.logits), traced.logits


def function_in_place(traced):
    traced.graph.call_function(torch.nn.functional.relu, (traced.x,), {"inplace": True})
    return traced.loss_of(traced.logits), traced.logits


def too_small(traced):
    traced.logits.meta["example_value"] = traced.logits.meta["example_value"][:1]
    return traced.loss_of(traced.logits), traced.logits


@pytest.mark.quick
@vary(
    "outputs",
    [
        returned_alone,
        not_returned,
        no_loss,
        parameter_behind,
        within_autocast,
        without_gradient,
        changed_in_place,
        method_in_place,
        operator_in_place,
        function_in_place,
        too_small,
    ],
)
def test_not_cut(outputs):
    """A graph would be cut where its halves compute something else, or for nothing."""
    traced = Traced()
    assert traced.cut(*outputs(traced)) is None
