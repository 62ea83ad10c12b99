# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Helpers on FX graphs, shared by this fork's ZeRO-1/2 passes and the base's ZeRO-3, AutoSP and AutoTP passes."""

from collections import defaultdict
from typing import Any, Callable, Dict, List, Optional

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate


def get_output_node(graph: Graph) -> Node:
    """Returns the graph's output node, or raises ValueError for a graph without one."""
    found = graph.find_nodes(op="output")
    if not found:
        raise ValueError("the graph has no output node")
    return found[0]


# The end of a backward ------------------------------------------------------------------------------------------


def _namespace(node: Node) -> Optional[str]:
    """Returns the operator namespace of a reduction, ours or that of the base's ZeRO-3, or None for other nodes."""
    for namespace in ("deepcompile", "dc"):
        ops = getattr(torch.ops, namespace)
        # An operator exists only once its native module is loaded.
        if hasattr(ops, "reduce_grad") and node.target == ops.reduce_grad.default:
            return namespace
    return None


def reduce_nodes(graph: Graph) -> List[Node]:
    """Lists the reductions of a backward graph in the order in which they run."""
    return [node for node in graph.nodes if _namespace(node)]


def _reduces(graph_id: int, needs_backward: bool) -> bool:
    """Whether a forward graph of ``graph_order`` has a backward that reduces.

    ZeRO-3's passes record only that a backward is needed. An input that requires grad suffices for that, but a
    graph without trainable parameters has nothing to reduce.
    """
    from .backend import param_manager

    if not needs_backward or graph_id not in param_manager:
        return needs_backward
    return any(entry.param.requires_grad for entry in param_manager[graph_id].params.values())


def should_release_reduce_buckets(graph_order, graph_id: int) -> bool:
    """Whether the backward of ``graph_id`` is the last one that reduces.

    Backwards run in the reverse of forward order, so that is the first forward graph that reduces. All forward
    graphs of a step are known when the first backward is compiled.

    Args:
        graph_order: (graph id, whether it needs a backward or, under ZeRO-1/2, whether it reduces) of each
            forward graph, in forward order.
        graph_id: one of these ids.
    """
    reducing = [candidate for candidate, needs_backward in graph_order if _reduces(candidate, needs_backward)]
    return not reducing or graph_id == reducing[0]


def add_end_backward(graph: Graph, graph_id: int, release_reduce_buckets: bool = True) -> None:
    """Inserts ``end_backward`` behind every reduction of a backward graph; does nothing where none reduces."""
    reductions = reduce_nodes(graph)
    if not reductions:
        return
    operands = list(reductions)
    if _namespace(reductions[-1]) == "deepcompile":
        # Our operator learns from a parameter whose buckets are meant.
        operands.append(reductions[-1].args[1])
    output = get_output_node(graph)
    with graph.inserting_before(output):
        end_backward = getattr(torch.ops, _namespace(reductions[-1])).end_backward.default
        graph.call_function(end_backward, (operands, graph_id, release_reduce_buckets))


def replace_reduce_outputs_with_none(graph: Graph) -> None:
    """Lets autograd see no gradient where the graph has reduced it."""
    output = get_output_node(graph)

    def unless_reduced(value):
        return None if isinstance(value, Node) and _namespace(value) else value

    output.args = (map_aggregate(output.args[0], unless_reduced),)


# Rewriting ------------------------------------------------------------------------------------------------------


def move_primals_to_head(graph: Graph) -> Graph:
    """Returns a copy of the graph in which all placeholders come first."""
    ordered = sorted(graph.nodes, key=lambda node: node.op != "placeholder")
    copy, copied = Graph(), {}
    for node in ordered:
        copied[node] = copy.node_copy(node, copied.__getitem__)
    copy.lint()
    return copy


def add_args_process(
    graph: Graph,
    node: Node,
    fn: Callable[..., Any],
    extra_args: Optional[List[Any]] = None,
    name: Optional[str] = None,
    meta: Optional[Dict[str, Any]] = None,
) -> List[Node]:
    """Passes each node argument of ``node`` through ``fn(argument, *extra_args)``; returns the inserted calls."""
    calls = []
    for argument in [candidate for candidate in node.args if isinstance(candidate, Node)]:
        with graph.inserting_before(node):
            call = graph.create_node("call_function", fn, (argument, *(extra_args or ())), name=name)
        call.meta.update(meta or {})
        node.replace_input_with(argument, call)
        calls.append(call)
    return calls


def add_postprocess(
    graph: Graph,
    node: Node,
    fn: Callable[..., Any],
    extra_args: Optional[List[Any]] = None,
    extra_kwargs: Optional[Dict[str, Any]] = None,
    name: Optional[str] = None,
    meta: Optional[Dict[str, Any]] = None,
) -> Node:
    """Passes the result of ``node`` through ``fn(result, *extra_args, **extra_kwargs)`` for all its users."""
    users = list(node.users)
    with graph.inserting_after(node):
        call = graph.create_node("call_function", fn, (node, *(extra_args or ())), dict(extra_kwargs or {}), name=name)
    for user in users:
        user.replace_input_with(node, call)
    call.meta.update(meta or {})
    return call


def _make_node_meta(node: Node, ds_id: int, comm: bool) -> Dict[str, Any]:
    """Metadata by which the base's profiling and scheduling passes know an inserted operator."""
    meta = dict(param_name=node.name, ds_id=ds_id, comm=comm)
    return {**meta, "tensor_meta": node.meta["tensor_meta"]} if "tensor_meta" in node.meta else meta


def replace_node_users(node: Node, replacement: Node, exclude: Optional[List[Node]] = None) -> None:
    """Makes every user of ``node`` except those in ``exclude`` use ``replacement``."""
    kept = set(exclude or ())
    for consumer in filter(lambda user: user not in kept, list(node.users)):
        consumer.replace_input_with(node, replacement)


def add_free_activations(graph_id: int, graph: Graph, activation_node_names: List[str]) -> None:
    """Inserts ``dc.free_tensors`` behind the last use of each named activation input of a backward graph.

    An offloaded activation is used through the node that waits for its return, which then is what gets freed.
    """
    from .util import get_last_uses

    activations = {node for node in graph.nodes if node.op == "placeholder" and node.name in activation_node_names}
    source_of = {
        node.args[2]: node.args[0] for node in graph.nodes if node.target == torch.ops.dc.reload_tensor.default
    }
    for node in graph.nodes:
        if node.target == torch.ops.dc.wait_reload.default and source_of[node.args[2]] in activations:
            activations.remove(source_of[node.args[2]])
            activations.add(node)

    freed_behind = defaultdict(list)
    for node, final_user in get_last_uses(graph)[0].items():
        if node in activations and "tensor_meta" in node.meta:
            freed_behind[final_user].append(node)
    for final_user, freed in freed_behind.items():
        with graph.inserting_after(final_user):
            graph.create_node(
                "call_function",
                torch.ops.dc.free_tensors.default,
                (freed,),
                {},
                name=f"free_activations_of_{final_user.name}",
            )


# Finding --------------------------------------------------------------------------------------------------------


def find_node_by_name(gm: GraphModule, name: str) -> Optional[Node]:
    """Returns the node called ``name``, or None."""
    return next((node for node in gm.graph.nodes if node.name == name), None)


def get_node_shape_meta(node: Node) -> Optional[torch.Tensor]:
    """Returns the fake tensor recorded for a node, by AOTAutograd or else by Dynamo."""
    for key in ("val", "example_value"):
        # A recorded tensor may be of any size and value, so its truth must not be asked.
        if node.meta.get(key) is not None:
            return node.meta[key]
    return None


def find_node_by_tag(gm: GraphModule, tag: str) -> Optional[Node]:
    """Returns the node whose input tensor carries ``tag`` as its attribute ``tag``, alone or as (tag, dimension)."""
    for node in gm.graph.nodes:
        found = (node.meta.get("tensor_dict") or {}).get("tag")
        if (found[0] if isinstance(found, tuple) else found) == tag:
            return node
    return None
