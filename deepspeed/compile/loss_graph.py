# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A loss that is computed from a large tensor which the model returns as well, as logits are, gets a graph of its own.

In one graph with what produced it, such a tensor has two gradients: the loss's, and one for whatever the caller does
with the tensor, for which autograd allocates zeros of its size if that is nothing. Between two graphs there is only
the first, and the tensor's memory is free as soon as the loss's graph has run backward.
"""

from typing import Callable, Optional, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from .fx import get_output_node

# Elements from which on zeros are worth avoiding: 32 MiB in bf16.
LARGE_NUMEL = 2**24
HEAD, LOSS = "submod_0", "submod_1"
# They hold for all that follows until they are undone, and must not be parted from that.
_CHANGES_STATE = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
)


def split_loss(gm: GraphModule, is_parameter: Sequence[bool]) -> Optional[GraphModule]:
    """Cuts a graph behind the last large tensor that it returns and computes with.

    Args:
        gm: as Dynamo traced it, for training.
        is_parameter: for each of its inputs, whether the optimizer owns it.

    Returns:
        A module that calls its submodules ``HEAD``, up to that tensor, and ``LOSS``; or None where there is no such
        tensor, or where parameters are used behind it.
    """
    parameters = {node for node, flag in zip(gm.graph.find_nodes(op="placeholder"), is_parameter) if flag}
    returned = _last_returned(gm.graph, parameters)
    if returned is None:
        return None
    nodes = list(gm.graph.nodes)
    head = set(nodes[: nodes.index(returned) + 1])
    return split_module(gm, gm, lambda node: int(node not in head))


def _last_returned(graph, parameters):
    output = get_output_node(graph)
    for node in reversed(graph.nodes):
        if node in output.all_input_nodes and set(node.users) - {output} and _is_large(node):
            return node
        if node.target in _CHANGES_STATE or (node is not output and parameters.intersection(node.all_input_nodes)):
            return None
    return None


def _is_large(node: Node) -> bool:
    value = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(value, torch.Tensor) or not value.requires_grad:
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
