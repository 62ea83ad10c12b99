# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How a compiled graph learns whose gradients it computes."""

import contextlib
from typing import Dict, Iterable, Iterator, Sequence, Tuple

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule

from ..own_thread import in_own_thread


class ParameterNumbers:
    """Makes the registrations: the input of a graph that lists the engine's parameters among the other inputs.

    This input is a tensor, and a reduction names its parameter by a position in it. A reduction cannot take the
    parameter itself: Inductor may give the backward a copy of a parameter in another layout, and a parameter that is
    saved for the backward must not be changed in between.

    ``identity`` is the engine's number. ``parameters``, in the reducer's order, must outlive the engine's graphs.
    """

    def __init__(self, identity: int, parameters: Iterable[torch.Tensor]):
        self._identity = identity
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        # Ids of parameters -> registrations, one for each layer that a graph serves. Graphs save it for the backward.
        self._made: Dict[Tuple[int, ...], torch.Tensor] = {}

    def __contains__(self, value: object) -> bool:
        """Whether a value is a registered parameter."""
        return id(value) in self._index

    def tensor_for(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns int64 [1 + n] on the host: the engine's number, and the index of each of n parameters.

        Raises:
            RuntimeError: if a parameter is not registered.
        """
        key = tuple(map(id, parameters))
        made = self._made.get(key)
        if made is None:
            if not all(number in self._index for number in key):
                raise RuntimeError(
                    "a compiled graph was called with a parameter that the engine's optimizer does not have: it was "
                    "put into the model, or its requires_grad set, after the engine was made; create a new engine"
                )
            numbers = [self._identity, *(self._index[number] for number in key)]
            # In a FakeTensorMode that the caller has open, this tensor would have no numbers, also later.
            made = in_own_thread(torch.tensor, numbers, dtype=torch.int64)
            self._made[key] = made
        return made


@contextlib.contextmanager
def one_more_input(gm: GraphModule) -> Iterator[None]:
    """Context in which a frame's graph has one more input, the last, for the :class:`ParameterNumbers` of a call.

    The context removes the input at its end, because Dynamo goes on with the graph and knows only its own inputs.
    """
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
        node = gm.graph.placeholder("registrations")
    # AOTAutograd asks for the user's name of each input. None says that this input has no name.
    node._dynamo_source = None
    gm.recompile()
    try:
        yield
    finally:
        gm.graph.erase_node(node)
        gm.recompile()


def traced_registrations(made: torch.Tensor, example_inputs: Sequence) -> torch.Tensor:
    """Returns the tensor that stands for ``made`` while a frame is traced, of constant size even if others vary."""
    fake_mode = detect_fake_mode(example_inputs)
    return made if fake_mode is None else fake_mode.from_tensor(made, static_shapes=True)
