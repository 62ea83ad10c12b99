# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How a compiled graph learns whose gradients it computes, and in which order it reduces them."""

import contextlib
from typing import Dict, List, Sequence, Tuple

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule


class Registrations:
    """Tells a graph, with each call, which of an engine's parameters it was given.

    The graph gets one more input for that, and reductions name parameters by their slot in it. The parameters
    themselves would not do: Inductor may hand its backward a copy in another layout, and saving them for the backward
    would forbid to change them in between.

    Args:
        identity: the engine's number.
        parameters: those that the reducer knows, in its order. They outlive the engine's graphs.
    """

    def __init__(self, identity, parameters):
        self._identity = identity
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        # One for each layer that a graph serves. Graphs keep them for their backwards.
        self._made: Dict[Tuple[int, ...], torch.Tensor] = {}

    def of(self, parameters) -> torch.Tensor:
        """Returns int64 [1 + n] on the host: the engine's number, and the index of each of n parameters."""
        key = tuple(map(id, parameters))
        made = self._made.get(key)
        if made is None:
            if not all(each in self._index for each in key):
                raise RuntimeError(
                    "a compiled graph was called with a parameter that the engine's optimizer does not have: it was "
                    "put into the model after engine.compile(); make the engine anew"
                )
            made = torch.tensor([self._identity, *(self._index[each] for each in key)], dtype=torch.int64)
            self._made[key] = made
        return made


def order_of_reductions(gm: GraphModule, is_reducible: Sequence[bool]) -> List[int]:
    """Lists the inputs of a frame that are parameters, by index, in the order in which all ranks reduce them.

    That is about the order in which a backward computes their gradients: the reverse of that in which the frame first
    uses them, as Dynamo traced it, which shapes do not change.
    """
    first_use = {}
    for position, node in enumerate(gm.graph.nodes):
        for used in node.all_input_nodes:
            first_use.setdefault(used, position)
    placeholders = gm.graph.find_nodes(op="placeholder")
    keys = {index: (first_use.get(placeholders[index], 0), index) for index, flag in enumerate(is_reducible) if flag}
    return sorted(keys, key=lambda index: keys[index], reverse=True)


@contextlib.contextmanager
def one_more_input(gm: GraphModule):
    """Within it a frame's graph has one more input, the last, for the :class:`Registrations` of a call.

    Dynamo goes on with the graph when it is compiled, and knows only its own inputs.
    """
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
        node = gm.graph.placeholder("registrations")
    # AOTAutograd asks for the user's name of each input. This input has none, and None says so.
    node._dynamo_source = None
    gm.recompile()
    try:
        yield
    finally:
        gm.graph.erase_node(node)
        gm.recompile()


def traced_registrations(made: torch.Tensor, example_inputs: Sequence) -> torch.Tensor:
    """Returns what stands for ``made`` while a frame is traced: its size is no symbol, whatever is dynamic."""
    fake_mode = detect_fake_mode(example_inputs)
    return made if fake_mode is None else fake_mode.from_tensor(made, static_shapes=True)
