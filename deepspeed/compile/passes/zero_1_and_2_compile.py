# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1/2 on graphs: reductions go into the joint graph, their order and end into the backward graph."""

from typing import List, Mapping

import torch
from torch._functorch._aot_autograd.fx_utils import get_all_input_and_grad_nodes
from torch.fx import GraphModule, Node

from ..fx import add_end_backward, get_output_node, reduce_nodes, replace_reduce_outputs_with_none
from .contract import PassContract

# Where reduce_grad takes the slot.
SLOT = 2

NAME_Z1 = "zero1_compile"
NAME_Z2 = "zero2_compile"
# A schedule rewrites gradients for one ZeRO stage.
CONTRACT_Z1 = PassContract(conflicts_with=frozenset({"zero3_compile"}))
CONTRACT_Z2 = PassContract(conflicts_with=frozenset({"zero3_compile", NAME_Z1}))


def insert_reductions(joint: GraphModule, slots: Mapping[int, int]) -> List[Node]:
    """Puts ``reduce_grad(gradient, registrations, slot)`` behind each parameter gradient of a joint graph.

    The graph learns with each call which parameters it was given, so that one graph serves several layers.

    Args:
        joint: forward and backward in one graph, as AOTAutograd traces them, with descriptors.
        slots: for each input of the traced frame that is a parameter, by its index: where the frame's last input, the
            registrations, says which parameter it is.

    Returns:
        The inserted nodes. The partitioner is told to keep them in the backward.
    """
    graph = joint.graph
    output = get_output_node(graph)
    results = list(output.args[0])
    inserted = []
    try:
        pairs = get_all_input_and_grad_nodes(graph)
    except RuntimeError:
        # An input is a tensor subclass, for which torch pairs nothing: these gradients take autograd's way.
        return inserted
    inputs = {getattr(node.meta.get("desc"), "idx", None): node for node in graph.find_nodes(op="placeholder")}
    places = {getattr(result, "grad_of", None): place for place, result in enumerate(output.meta["desc"])}
    for descriptor, (_, gradient) in pairs.items():
        slot = slots.get(getattr(descriptor, "idx", None))
        if gradient is None or slot is None:
            continue
        registrations = inputs[max(index for index in inputs if index is not None)]
        with graph.inserting_after(gradient):
            reduction = graph.call_function(torch.ops.deepcompile.reduce_grad.default, (gradient, registrations, slot))
        reduction.meta["val"] = gradient.meta["val"].new_empty(0)
        reduction.meta["partitioner_tag"] = "must_be_in_backward"
        # Two parameters may have one gradient between them: each replaces it in its own place.
        results[places[descriptor]] = reduction
        inserted.append(reduction)
    output.args = (results,)
    joint.recompile()
    return inserted


def finish_backward_graph(backward: GraphModule, graph_id: int, release_reduce_buckets: bool) -> None:
    """Orders the reductions of a backward graph, ends it with ``end_backward`` and hides the reduced gradients."""
    reductions = sorted(reduce_nodes(backward.graph), key=lambda node: node.args[SLOT])
    if not reductions:
        return
    # Ranks may have compiled this frame for different shapes. Their graphs then compute gradients in different orders
    # (that of a parameter which is added to a batch of one is no sum, and is there earlier), and are scheduled
    # differently. Each reduction waits for the one before, so that all ranks reduce in the order of slots.
    position = {node: index for index, node in enumerate(backward.graph.nodes)}
    for earlier, later in zip(reductions, reductions[1:]):
        if position[later] < position[earlier]:
            earlier.append(later)
            position[later] = position[earlier]
        later.args = (*later.args[: SLOT + 1], earlier)
    add_end_backward(backward.graph, graph_id, release_reduce_buckets)
    replace_reduce_outputs_with_none(backward.graph)
    backward.graph.lint()
    backward.recompile()


def give_gradients_away(backward: GraphModule) -> None:
    """Lets reductions keep gradients that nothing else in the graph uses.

    For a graph that runs as it is traced, node by node. Inductor rearranges it first and decides for itself.
    """
    for reduction in reduce_nodes(backward.graph):
        gradient = reduction.args[0]
        if gradient.op == "call_function" and len(gradient.users) == 1:
            reduction.kwargs = {**reduction.kwargs, "may_keep": True}
    backward.recompile()


def _refuse(*_args, **_kwargs):
    raise NotImplementedError(
        "DeepCompile ZeRO-1/2 rewrites the joint graph before it is partitioned, so its pass "
        "cannot run in a schedule; call engine.compile() without `schedule`"
    )


# The engine registers these names, and a schedule may hold them alone; init_z1_and_2() recognises them there.
def add_z1_reduce(*args, **kwargs):
    """Stands for ZeRO-1 in a schedule. Not called."""
    _refuse()


def add_z2_reduce(*args, **kwargs):
    """Stands for ZeRO-2 in a schedule. Not called."""
    _refuse()
