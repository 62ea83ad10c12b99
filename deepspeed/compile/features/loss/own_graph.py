# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gives a loss its own graph if a model computes the loss from a large tensor, such as logits, and returns both.

With one graph, autograd would pass two gradients into the backward: the gradient of the loss, and the gradient of the
returned tensor. If the caller does not use the returned tensor, its gradient would be zeros, allocated in full size.
With two graphs, autograd passes only the gradient that the loss's backward computes, and the returned tensor's memory
is free as soon as that backward has run.
"""

import operator
from typing import Callable, Optional, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

# From this number of elements on (32 MiB in bf16), avoiding the zeros is worth a second graph.
LARGE_NUMEL = 2**24
# The names that split_module() gives to the parts of a graph. For split_loss(), HEAD ends with the returned tensor.
# For ChunkedLosses.cut_out(), HEAD ends with the hidden states, and REST needs logits or loss.
HEAD, REST = "submod_0", "submod_1"
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor".split()
_IN_PLACE = {operator.setitem, *(getattr(operator, f"i{name}") for name in _OPERATORS)}


def split_loss(gm: GraphModule, is_registered: Sequence[bool]) -> Optional[GraphModule]:
    """Cuts a graph after the last large tensor that the graph returns and from which it computes a loss.

    ``torch.compile`` alone compiles the rest, and gives gradients of parameters to autograd. A graph that uses
    parameters after the tensor is not cut, because their gradients would be copied.

    Args:
        gm: a graph for training, as Dynamo traced it.
        is_registered: for each input of the graph, whether it is a registered parameter.

    Returns:
        A module that calls its submodules ``HEAD`` and ``REST``. None if the graph has no such tensor, or if the graph
        uses parameters or changes something in place after the tensor.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    parameters = {node for node, flag in zip(placeholders, is_registered) if flag}
    returned = _last_returned(gm.graph, parameters)
    if returned is None:
        return None
    nodes = list(gm.graph.nodes)
    head = set(nodes[: nodes.index(returned) + 1])
    return split_module(gm, gm, lambda node: int(node not in head))


def _last_returned(graph, parameters):
    """Returns the node of the tensor after which the graph can be cut, or None."""
    output = graph.output_node()
    has_loss, open_contexts = False, set()
    for node in reversed(graph.nodes):
        if node is output:
            continue
        if node in output.all_input_nodes and set(node.users) - {output} and _is_large(node):
            return node if has_loss and not open_contexts else None
        if parameters.intersection(node.all_input_nodes) or changes_in_place(node):
            return None
        # An autocast context must not begin in one graph and end in the other.
        if node.target is torch.amp.autocast_mode._exit_autocast:
            open_contexts.update(node.all_input_nodes)
        open_contexts.discard(node)
        has_loss = has_loss or (node in output.all_input_nodes and _is_scalar(node))
    return None


def traced_tensor(node: Node) -> Optional[torch.Tensor]:
    """Returns the fake tensor that stood for a node's result when Dynamo traced it, or None if that is no tensor."""
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def changes_in_place(node: Node) -> bool:
    if node.target in _IN_PLACE or node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _is_scalar(node: Node) -> bool:
    value = traced_tensor(node)
    return value is not None and value.dim() == 0 and value.requires_grad


def _is_large(node: Node) -> bool:
    value = traced_tensor(node)
    if node.op == "placeholder" or value is None or not value.requires_grad:
        return False
    numel = value.numel() if isinstance(value.numel(), int) else value.numel().node.hint
    # Exclude tensors that were changed in place: only one of the two graphs would know of the change.
    return numel is not None and numel >= LARGE_NUMEL and value._version == 0


def replace(split: GraphModule, name: str, compile_graph: Callable) -> None:
    """Replaces the submodule ``name`` by ``compile_graph(submodule)``."""
    graph_module = getattr(split, name)
    output = graph_module.graph.output_node()
    alone = isinstance(output.args[0], Node)
    if alone:
        # Compilers expect a graph that returns a tuple.
        output.args = ((output.args[0],),)
        graph_module.recompile()
    compiled = compile_graph(graph_module)
    delattr(split, name)
    setattr(split, name, (lambda *args: compiled(*args)[0]) if alone else compiled)


def inputs_of_head(split: GraphModule, example_inputs: Sequence) -> list:
    """Picks the inputs of ``HEAD``, in the order of its arguments, from the inputs of the graph that was cut."""
    placeholders = split.graph.find_nodes(op="placeholder")
    values = dict(zip(placeholders, example_inputs, strict=True))
    (call,) = split.graph.find_nodes(op="call_module", target=HEAD)
    return [values[argument] for argument in call.args]
