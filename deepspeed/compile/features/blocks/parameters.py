# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Finds the parameters and the modules that the blocks of a model hold, and parameters of layers that look alike."""

from collections import defaultdict
from typing import Dict, Iterable, List, Sequence, Set

import torch
from torch.nn import Module, Parameter


def modules_outside(module: Module, blocks: List[Module]) -> List[Module]:
    """Lists the modules that are registered outside of blocks, even if a block has them too."""
    ids, found = {id(block) for block in blocks}, {}

    def walk(holder):
        found[id(holder)] = holder
        for child in holder.children():
            if id(child) not in found and id(child) not in ids:
                walk(child)

    walk(module)
    return [*found.values()]


def held_by_scripts(module: Module) -> Set[int]:
    """Returns the ids of the parameters of ScriptModules, whose code runs in C++, where nothing sees it read them."""
    scripts = (submodule for submodule in module.modules() if isinstance(submodule, torch.jit.ScriptModule))
    return {id(parameter) for script in scripts for parameter in script.parameters()}


def holders_outside(module: Module, blocks: List[Module]) -> Dict[int, List[Module]]:
    """Returns id of a parameter -> the modules outside of blocks that hold it themselves.

    Parameters that a ScriptModule holds are left out.
    """
    holders, scripted = defaultdict(list), held_by_scripts(module)
    for submodule in modules_outside(module, blocks):
        for parameter in submodule.parameters(recurse=False):
            if id(parameter) not in scripted:
                holders[id(parameter)].append(submodule)
    return holders


def by_block(parameters: Iterable[Parameter], module: Module, blocks: List[Module]) -> List[List[Parameter]]:
    """Splits ``parameters`` into those that no block or several blocks hold, and then those of each block alone.

    ``parameters`` may include parameters that the module lacks, as an optimizer may.
    """
    outside = {
        id(parameter)
        for submodule in modules_outside(module, blocks)
        for parameter in submodule.parameters(recurse=False)
    }
    holders: Dict[int, Set[int]] = defaultdict(set)
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            holders[id(parameter)].add(index)
    lists: List[List[Parameter]] = [[] for _ in range(1 + len(blocks))]
    for parameter in parameters:
        held_by = holders[id(parameter)]
        alone = len(held_by) == 1 and id(parameter) not in outside
        lists[1 + next(iter(held_by)) if alone else 0].append(parameter)
    return lists


def partially_trained_lookalikes(module: Module, registered: Sequence[Parameter]) -> List[Parameter]:
    """Lists trained parameters that look alike, of which only some are registered.

    The caller may train a parameter that no optimizer has. Layers that look alike share one graph, and no guard
    distinguishes a registered parameter from another one. Parameters look alike if modules of one class hold them
    under one name. Torch's own leaf layers do not count as holders, because the graph of their parent contains them.
    """
    known, places = {id(parameter) for parameter in registered}, defaultdict(list)
    for holder in module.modules():
        if type(holder).__module__.startswith("torch.nn.") and next(holder.children(), None) is None:
            continue
        for name, parameter in holder.named_parameters():
            if parameter.requires_grad:
                places[type(holder), name, parameter.shape, parameter.dtype].append(parameter)
    mixed = (place for place in places.values() if len({id(parameter) in known for parameter in place}) == 2)
    return list({id(parameter): parameter for place in mixed for parameter in place}.values())
