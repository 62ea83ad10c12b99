# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Large trained parameters that no block holds, such as an embedding and a head (``compile.shard_parameters: "all"``).

Each is a unit of its own. ``passes.py`` gathers it.
"""

from typing import Iterable, Iterator, List, Tuple

from torch.nn import Embedding, Module, Parameter

from ...fixes.base.subclasses import plain_tensors
from ..blocks.choose_blocks import parents_of
from ..blocks.parameters import holders_outside

# A parameter with at least this part of the largest block's bytes is not kept whole on every rank.
LARGE_PART = 1 / 8


def large_outside(parameters: List[Parameter], module: Module, blocks: List[Module]) -> List[Parameter]:
    """Lists those of ``parameters`` that are large and that a module outside of blocks holds, and no block."""
    sizes = (sum(tensor.nbytes for tensor in plain_tensors(block.parameters())) for block in blocks)
    smallest = max(LARGE_PART * max(sizes, default=0), 1)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    holders = holders_outside(module, blocks)
    return [
        parameter
        for parameter in parameters
        if id(parameter) in holders and id(parameter) not in inside and parameter.nbytes >= smallest
    ]


def read_times(
    parameters: Iterable[Parameter], module: Module, blocks: List[Module]
) -> Tuple[List[Parameter], List[Parameter]]:
    """Lists those of ``parameters`` that are read before blocks, and those that are read after them.

    The former belong to embeddings, and the latter to modules around those that call blocks, such as a head.
    """
    holders = holders_outside(module, blocks)
    within = {id(part) for parent in parents_of(module, blocks) for part in parent.modules()}
    first = [weight for weight in parameters if any(isinstance(holder, Embedding) for holder in holders[id(weight)])]
    return first, [weight for weight in parameters if any(id(holder) not in within for holder in holders[id(weight)])]


def beside_blocks(
    parameters: Iterable[Parameter], module: Module, blocks: List[Module]
) -> Iterator[Tuple[Module, Module, Parameter]]:
    """Yields (the module that calls blocks, a layer beside these, its parameter).

    Embeddings are left out, and parameters that several modules hold, or that the former module holds itself: it may
    read these anywhere. So are layers with or within another one's large parameter, such as ``MultiheadAttention``:
    they read several together.
    """
    callers = sorted(parents_of(module, blocks), key=lambda caller: len(list(caller.modules())), reverse=True)
    # If callers lie within each other, take the innermost one.
    caller_of = {id(part): caller for caller in callers for part in caller.modules() if part not in callers}
    holders = holders_outside(module, blocks)
    for parameter in parameters:
        layer, *others = holders[id(parameter)]
        if others or id(layer) not in caller_of or isinstance(layer, Embedding):
            continue
        near = [
            other
            for other in parameters
            if any(layer in holder.modules() or holder in layer.modules() for holder in holders[id(other)])
        ]
        if len(near) == 1:
            yield caller_of[id(layer)], layer, parameter
