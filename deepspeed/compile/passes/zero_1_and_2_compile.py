# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1/2 on graphs: reductions go into the joint graph, their order and end into the backward graph."""

from typing import List, Sequence

import torch
from torch._functorch._aot_autograd.fx_utils import get_all_input_and_grad_nodes
from torch.fx import GraphModule, Node

from ..fx import add_end_backward, get_output_node, reduce_nodes, replace_reduce_outputs_with_none
from .contract import PassContract

NAME_Z1 = "zero1_compile"
NAME_Z2 = "zero2_compile"
# A schedule rewrites gradients for one ZeRO stage.
CONTRACT_Z1 = PassContract(conflicts_with=frozenset({"zero3_compile"}))
CONTRACT_Z2 = PassContract(conflicts_with=frozenset({"zero3_compile", NAME_Z1}))


def insert_reductions(joint: GraphModule, is_parameter: Sequence[bool]) -> List[Node]:
    """Puts ``reduce_grad(gradient, parameter)`` behind each parameter gradient of a joint graph.

    The parameter itself is an operand, so that a graph that serves several layers reduces each layer's own.

    Args:
        joint: forward and backward in one graph, as AOTAutograd traces them, with descriptors.
        is_parameter: for each input of the traced frame, whether it is a parameter that an optimizer owns.

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
    for descriptor, (parameter, gradient) in pairs.items():
        index = getattr(descriptor, "idx", None)
        if gradient is None or index is None or not is_parameter[index]:
            continue
        with graph.inserting_after(gradient):
            reduction = graph.call_function(torch.ops.deepcompile.reduce_grad.default, (gradient, parameter))
        reduction.meta["val"] = gradient.meta["val"].new_empty(0)
        reduction.meta["partitioner_tag"] = "must_be_in_backward"
        # Two parameters may have one gradient between them: each replaces it in its own place.
        place = _place_of_gradient(output, descriptor)
        results[place] = reduction
        inserted.append(reduction)
    output.args = (results,)
    joint.recompile()
    return inserted


def _place_of_gradient(output: Node, descriptor) -> int:
    """Returns the index, among the joint graph's outputs, of the gradient of the input with ``descriptor``."""
    for place, result in enumerate(output.meta["desc"]):
        if getattr(result, "grad_of", None) == descriptor:
            return place
    raise AssertionError(f"no gradient of {descriptor} among the outputs of the joint graph")


def finish_backward_graph(backward: GraphModule, graph_id: int, release_reduce_buckets: bool) -> None:
    """Orders the reductions of a backward graph, ends it with ``end_backward`` and hides the reduced gradients."""
    reductions = reduce_nodes(backward.graph)
    if not reductions:
        return
    # Ranks may have compiled this frame for different shapes, and then schedule it differently. Each
    # reduction waits for the one before, so that all ranks reduce in the order of the traced backward.
    for earlier, later in zip(reductions, reductions[1:]):
        later.args = (later.args[0], later.args[1], earlier)
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
