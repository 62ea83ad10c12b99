# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
# Names and signatures of the overridden functions are those of the base's fx.py, which is
# Copyright (c) Microsoft Corporation.
# SPDX-License-Identifier: Apache-2.0
"""The base's helpers on FX graphs, with this fork's end of a backward.

The base's ZeRO-3, AutoSP and AutoTP passes import these names too, so the overrides also serve ZeRO-3. The overrides
know the reductions of both native modules, and release buckets after the last graph that really reduces.
"""

from typing import Any, Iterable, List, Tuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from . import fx_base
from .fx_base import *  # noqa: F403 (whatever a new base adds is found here too)
from .fx_base import _make_node_meta  # noqa: F401 (the base's passes import the first from here)


def get_output_node(graph: Graph) -> Node:
    """Returns the graph's output node.

    The base looks for the target "output", which an input has as well if the user's variable has this name.

    Raises:
        ValueError: if the graph has no output node.
    """
    found = graph.find_nodes(op="output")
    if not found:
        raise ValueError("the graph has no output node")
    return found[0]


def _namespace(node: Any) -> str:
    """Returns the operator namespace of a reduction (this fork's or ZeRO-3's), or "" if a node is no reduction."""
    if not isinstance(node, Node):
        return ""
    for namespace in ("deepcompile", "dc"):
        ops = getattr(torch.ops, namespace)
        # An operator exists only once its native module is loaded.
        if hasattr(ops, "reduce_grad") and node.target == ops.reduce_grad.default:
            return namespace
    return ""


def reduce_nodes(graph: Graph) -> List[Node]:
    """Lists the reductions of a backward graph in the order in which they run."""
    return [node for node in graph.nodes if _namespace(node)]


def _reduces(graph_id: int, needs_backward: bool) -> bool:
    """Whether a forward graph of ``graph_order`` has a backward that reduces.

    ZeRO-3's passes record only whether a graph needs a backward. One input that requires grad makes a graph need a
    backward, but a graph without trainable parameters has nothing to reduce.
    """
    from .backend import param_manager

    if not needs_backward or graph_id not in param_manager:
        return needs_backward
    return any(entry.param.requires_grad for entry in param_manager[graph_id].params.values())


def should_release_reduce_buckets(graph_order: Iterable[Tuple[int, bool]], graph_id: int) -> bool:
    """Whether the backward of ``graph_id`` is the last one that reduces.

    Backwards run in the reverse of forward order, so the last backward that reduces belongs to the first forward graph
    that reduces. All forward graphs of a step are known when the first backward is compiled.

    Args:
        graph_order: (graph id, whether it needs a backward or, under ZeRO-1/2, whether it reduces) of each
            forward graph, in forward order.
        graph_id: one of these ids.
    """
    reducing = [(candidate, _reduces(candidate, needs_backward)) for candidate, needs_backward in graph_order]
    return fx_base.should_release_reduce_buckets(reducing, graph_id)


def add_end_backward(graph: Graph, graph_id: int, release_reduce_buckets: bool = True) -> None:
    """Inserts one ``end_backward`` after all reductions of a backward graph. Does nothing if there is no reduction."""
    reductions = reduce_nodes(graph)
    if not reductions:
        return
    namespace, operands = _namespace(reductions[-1]), list(reductions)
    if namespace == "deepcompile":
        # This fork's operator finds the engine's reducer by the engine's number in the registrations.
        operands.append(reductions[-1].args[1])
    with graph.inserting_before(get_output_node(graph)):
        end_backward = getattr(torch.ops, namespace).end_backward.default
        graph.call_function(end_backward, (operands, graph_id, release_reduce_buckets))


def replace_reduce_outputs_with_none(graph: Graph) -> None:
    """Replaces each reduced gradient in the outputs of a backward graph by None, so autograd accumulates nothing."""
    output = get_output_node(graph)
    output.args = (map_aggregate(output.args[0], lambda value: None if _namespace(value) else value),)
