# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A loss that is computed from a large tensor which the model returns as well, as logits are, gets a graph of its own.

Otherwise autograd hands the one graph two gradients: that of the loss, and that of the returned tensor. If the caller
does nothing with the tensor, the second is zeros, allocated in its size. Between two graphs there is only the loss's,
and the tensor's memory is free as soon as the loss's graph has run backward.
"""

import operator
from typing import Callable, Optional, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from ...fx import get_output_node

# Elements from which on zeros are worth avoiding: 32 MiB in bf16.
LARGE_NUMEL = 2**24
# What the two graphs are called: up to the returned tensor, and behind it.
HEAD, LOSS = "submod_0", "submod_1"
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor".split()
_IN_PLACE = {operator.setitem, *(getattr(operator, f"i{name}") for name in _OPERATORS)}


def split_loss(gm: GraphModule, is_registered: Sequence[bool]) -> Optional[GraphModule]:
    """Cuts a graph behind the last large tensor that it returns and computes a loss from.

    Whether that is done must not change the order in which ranks reduce, since it depends on a rank's own shapes. So
    nothing is cut where gradients would come from behind the tensor.

    Args:
        gm: as Dynamo traced it, for training.
        is_registered: for each of its inputs, whether it is a parameter that the optimizer owns.

    Returns:
        A module that calls its submodules ``HEAD`` and ``LOSS``, or None where there is no such tensor, where
        parameters are used or something is changed in place behind it.
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
    output = get_output_node(graph)
    has_loss, left_behind = False, set()
    for node in reversed(graph.nodes):
        if node is output:
            continue
        if node in output.all_input_nodes and set(node.users) - {output} and _is_large(node):
            return node if has_loss and not left_behind else None
        if parameters.intersection(node.all_input_nodes) or _changes_in_place(node):
            return None
        # An autocast region must not begin in one graph and end in the other.
        if node.target is torch.amp.autocast_mode._exit_autocast:
            left_behind.update(node.all_input_nodes)
        left_behind.discard(node)
        has_loss = has_loss or (node in output.all_input_nodes and _is_scalar(node))
    return None


def _traced_tensor(node: Node) -> Optional[torch.Tensor]:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def _changes_in_place(node: Node) -> bool:
    if node.target in _IN_PLACE or node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _is_scalar(node: Node) -> bool:
    value = _traced_tensor(node)
    return value is not None and value.dim() == 0 and value.requires_grad


def _is_large(node: Node) -> bool:
    value = _traced_tensor(node)
    if node.op == "placeholder" or value is None or not value.requires_grad:
        return False
    numel = value.numel() if isinstance(value.numel(), int) else value.numel().node.hint
    # What was changed in place is known to one graph only.
    return numel is not None and numel >= LARGE_NUMEL and value._version == 0


def replace(split: GraphModule, name: str, compile_graph: Callable) -> None:
    """Replaces the submodule ``name`` by what ``compile_graph(submodule)`` returns."""
    graph_module = getattr(split, name)
    output = get_output_node(graph_module.graph)
    alone = isinstance(output.args[0], Node)
    if alone:
        # Compilers want a tuple.
        output.args = ((output.args[0],),)
        graph_module.recompile()
    compiled = compile_graph(graph_module)
    delattr(split, name)
    setattr(split, name, (lambda *args: compiled(*args)[0]) if alone else compiled)


def inputs_of_head(split: GraphModule, example_inputs: Sequence) -> list:
    """Picks from the inputs of the graph that was cut those of ``HEAD``, in its order."""
    placeholders = split.graph.find_nodes(op="placeholder")
    values = dict(zip(placeholders, example_inputs, strict=True))
    (call,) = split.graph.find_nodes(op="call_module", target=HEAD)
    return [values[argument] for argument in call.args]


def compile_loss(loss: GraphModule, **arguments) -> Callable:
    """Returns what ``torch.compile`` with these arguments makes of a graph without reductions, when it is called."""

    # A graph module that Dynamo has made is left uncompiled by torch 2.11, a function that calls it is not.
    def compute_loss(*args):
        return loss(*args)

    # Torch counts compilations by code objects, so each graph gets one of its own.
    compute_loss.__code__ = compute_loss.__code__.replace()
    return torch.compile(compute_loss, **arguments)
