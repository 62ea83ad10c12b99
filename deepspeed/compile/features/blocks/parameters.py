# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Finds the parameters and the modules that the blocks of a model hold."""

from collections import defaultdict
from typing import Dict, Iterable, List, Set

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
