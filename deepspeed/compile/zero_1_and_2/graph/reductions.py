# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Inserts reductions into joint graphs, and ends them in backward graphs."""

from typing import List, Mapping, Optional

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate


def index_of(placeholder: Node) -> Optional[int]:
    """Returns which input of the frame this input of its graph is, or None if it is only derived from one."""
    return _index(placeholder.meta.get("desc"))


def _index(descriptor):
    return descriptor.idx if isinstance(descriptor, PlainAOTInput) else None


def insert_reductions(joint: GraphModule, positions: Mapping[int, int]) -> None:
    """Puts ``reduce_grad(gradient, registrations, position)`` after each parameter gradient of a joint graph.

    The registrations tell the graph in each call which parameters it was given, so one graph serves several layers.

    ``joint`` is forward and backward in one graph, as AOTAutograd traces them, with descriptors. ``positions``: index
    of a frame's input -> position in the registrations, which are the frame's last input.
    """
    graph = joint.graph
    output = graph.output_node()
    results = list(output.args[0])
    # A tensor subclass among a frame's inputs takes several inputs of the graph, so count by descriptors.
    inputs = {index: node for node in graph.find_nodes(op="placeholder") if (index := index_of(node)) is not None}
    for place, (gradient, descriptor) in enumerate(zip(results, output.meta["desc"])):
        position = positions.get(_index(getattr(descriptor, "grad_of", None)))
        if gradient is None or position is None:
            continue
        registrations = inputs[max(inputs)]
        arguments = gradient, registrations, position
        with graph.inserting_after(gradient):
            reduction = graph.call_function(torch.ops.deepcompile.reduce_grad.default, arguments)
        reduction.meta["val"] = gradient.meta["val"].new_empty(0)
        # The partitioner puts nodes with this tag into the backward.
        reduction.meta["partitioner_tag"] = "must_be_in_backward"
        # Two parameters may share one gradient, so the reduction replaces only this parameter's output.
        results[place] = reduction
    output.args = (results,)
    joint.recompile()


def reduce_nodes(graph: Graph) -> List[Node]:
    """Lists the reductions of a backward graph in the order in which they run."""
    return graph.find_nodes(op="call_function", target=torch.ops.deepcompile.reduce_grad.default)


def finish_backward_graph(backward: GraphModule, release_reduce_buckets: bool) -> None:
    """Makes a backward graph return None for each gradient that it reduces, so that autograd accumulates nothing.

    With ``release_reduce_buckets``, adds one ``end_backward`` after all reductions, unless the graph has none.
    """
    reductions, output = reduce_nodes(backward.graph), backward.graph.output_node()
    if not reductions:
        return
    if release_reduce_buckets:
        # The registrations lead to the engine's reducer.
        after = [*reductions, reductions[-1].args[1]]
        with backward.graph.inserting_before(output):
            backward.graph.call_function(torch.ops.deepcompile.end_backward.default, (after, True))
    output.args = (map_aggregate(output.args[0], lambda value: None if value in reductions else value),)
    backward.graph.lint()
    backward.recompile()


def donate_gradients(backward: GraphModule) -> None:
    """Donates each gradient that only its reduction uses: the reducer may keep the gradient's memory.

    This is for graphs that run as split, node by node. Inductor rearranges a graph first, so ``lowering.py`` decides
    for generated code.
    """
    for reduction in reduce_nodes(backward.graph):
        gradient = reduction.args[0]
        if gradient.op == "call_function" and len(gradient.users) == 1:
            reduction.kwargs = {**reduction.kwargs, "donated": True}
    backward.recompile()
