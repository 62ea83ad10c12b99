# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the user does for long sequences: inputs of checkpointed layers on the host, MLPs and the loss in tiles.

DeepSpeed's own functions compute tiles here too, of tensors without memory.
"""

import collections
import functools
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence
from unittest.mock import patch

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node
from torch.nn import Module
from torch.nn.functional import cross_entropy, linear

from .graphs import without_hooks
from .head import Recorder
from .liveness import bytes_of

# How many inputs CheckpointHiddenStatesOffload leaves on the device: the last one, and one whose copy may not be
# done.
LEFT_ON_DEVICE = 2
# One of them has no copy on the host.
WITHOUT_COPY = 1


class Unsuitable(ValueError):
    """The reason why a model cannot be trained as the user says."""


class InputsOnHost:
    """Stands for ``CheckpointHiddenStatesOffload``, around each checkpointed layer.

    Attributes:
        sizes: bytes of each input that a layer saved, in the order of the layers.
    """

    def __init__(self) -> None:
        self.sizes: List[int] = []
        self._here: Dict[int, torch.Tensor] = collections.OrderedDict()

    def hooks(self) -> saved_tensors_hooks:
        """Returns a context for a layer."""
        return saved_tensors_hooks(self._send, self._bring_back)

    def pinned(self) -> int:
        """Returns the bytes of the host's memory. Torch pins as many as the next power of two."""
        return sum(1 << (size - 1).bit_length() for size in self.sizes[:-WITHOUT_COPY])

    def _send(self, tensor):
        number = len(self.sizes)
        self.sizes.append(bytes_of(tensor))
        self._here[number] = tensor
        while len(self._here) > LEFT_ON_DEVICE:
            del self._here[min(self._here)]
        return number, functools.partial(
            torch.empty_strided, tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )

    def _bring_back(self, handle):
        number, make = handle
        here = self._here.pop(number, None)
        return make() if here is None else here


def mlp_of(block: Module) -> Module:
    """Returns the MLP of a block, by the name that transformers gives its class.

    Raises:
        Unsuitable: if there is not one.
    """
    found = [module for module in block.modules() if type(module).__name__.endswith("MLP")]
    if len(found) != 1:
        raise Unsuitable(
            f"{type(block).__name__} has {len(found)} modules whose class is named ...MLP, and not one; ask without "
            "tiles of MLPs"
        )
    return found[0]


class Parts(NamedTuple):
    """The code of a block before its MLP, and behind it. Both take parameters and tensors, and return tensors."""

    before: Callable  # returns the MLP's input, and other values that ``behind`` needs
    behind: Callable  # takes these values too, and the MLP's output, and returns what the block returns


def split_at(
    function: Callable, mlp: Module, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> Parts:
    """Splits a block's code where its graph ends in training, at an MLP in tiles.

    Args:
        function: the block's code: takes parameters and tensors, and returns a list of tensors.
        parameters, tensors: fake tensors.
    """
    given = [torch.empty_like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]
    recorder = Recorder((*parameters, *given))
    calls = []  # of each call: the nodes before it, and those of the MLP's input and output
    kept: List[torch.Tensor] = []  # a tensor's node is found by its id

    def note(x):
        before = _without_inputs(recorder.graph)
        with torch._C.DisableTorchFunction():
            y = torch.empty_like(x)
        # Nothing has recorded how the output was made, so it becomes an input.
        calls.append((before, recorder.node_of(x), recorder.node_of(y)))
        kept.append(y)
        return y

    with without_hooks(), patch.object(mlp, "forward", note), recorder:
        results = [recorder.node_of(result) for result in function(*parameters, *given)]
    if len(calls) != 1:
        raise Unsuitable(f"a block calls its {type(mlp).__name__} {len(calls)} times; ask without tiles of MLPs")
    before, x, y = calls[0]
    inputs = recorder.graph.find_nodes(op="placeholder")[: len(parameters) + len(given)]
    behind = [node for node in _without_inputs(recorder.graph) if node not in before]
    needed = {node for later in behind for node in later.all_input_nodes}.union(results)
    passed = [node for node in before if node in needed]
    return Parts(_module_of(inputs, before, [x, *passed]), _module_of([*inputs, *passed, y], behind, results))


def _without_inputs(graph):
    return [node for node in graph.nodes if node.op != "placeholder"]


def _module_of(inputs: Sequence[Node], nodes: Sequence[Node], results: Sequence[Node]) -> GraphModule:
    graph = Graph()
    copies = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(inputs)}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in results])
    return GraphModule({}, graph)


def in_tiles(mlp: Module, x: torch.Tensor, tiles: int) -> torch.Tensor:
    """Returns an MLP's output, as DeepSpeed's ``TiledMLP`` computes it."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    return TiledMLP.apply(type(mlp).forward, mlp, x, tiles, list(mlp.parameters()))


def loss_in_tiles(model: Module, hidden: Optional[torch.Tensor], tiles: int) -> torch.Tensor:
    """Returns the loss of a language model, as DeepSpeed's ``sequence_tiled_compute`` computes it with the head."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or hidden is None:
        raise Unsuitable(
            f"{type(model).__name__} has no get_output_embeddings(), or no module that calls its blocks; ask without "
            "tiles of the loss"
        )

    def loss_of(x, y):
        return cross_entropy(linear(x, head.weight).flatten(0, 1).float(), y.flatten(), reduction="sum")

    targets = torch.zeros(hidden.shape[:2], dtype=torch.long)
    return sequence_tiled_compute(
        loss_of,
        hidden.shape[1],
        tiles,
        {"x": hidden, "y": targets},
        {},
        "x",
        [head.weight],
        output_unshard_dimension=0,
        output_reduction="sum",
    )
