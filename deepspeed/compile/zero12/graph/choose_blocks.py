# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which repeated blocks of a model become graphs of their own.

A reduction learns at run time which parameter it is for, so one graph reduces every layer's gradients.
"""

import inspect
from collections import defaultdict
from typing import List, Tuple

import torch
from torch.nn import Embedding, Module, ModuleDict, ModuleList, Sequential

from .block_classes import plain_class, subclass

# They hold modules and are no part of a model's depth themselves.
CONTAINERS = (ModuleList, ModuleDict, Sequential)


def choose_blocks(module: Module, wanted, compile_kwargs) -> Tuple[List[Module], str]:
    """Decides which blocks become graphs of their own.

    Args:
        module: the model.
        wanted: the option ``compile.regional_compilation``. None for the blocks that repeat, if they are alike, can be
            compiled, and are called by a module inside of the model, of whose parameters they have most. What is
            around that one, usually head and loss, is still compiled.
        compile_kwargs: further arguments of ``torch.compile``.

    Returns:
        The blocks, and if there are none the reason why the model is compiled as a whole.

    Raises:
        ValueError: as :func:`find_blocks`, if they were asked for.
    """
    if wanted is False:
        return [], "compile.regional_compilation is false"
    if wanted is not None:
        return find_blocks(module, wanted), ""
    if compile_kwargs.get("fullgraph"):
        return [], "compile_kwargs['fullgraph'] asks for one graph"
    blocks = _each_once(_repeated(module))
    if blocks and all(block._compiled_call_impl is not None for block in blocks) and not _obstacle(module, blocks):
        # Somebody has chosen already, as Accelerate does when it is asked for regional compilation.
        return blocks, ""
    why = _reason_for_whole(module, blocks)
    return ([], why) if why else (blocks, "")


def _reason_for_whole(module, blocks):
    if not blocks:
        return f"no blocks repeat in {type(module).__name__}"
    obstacle = _obstacle(module, blocks)
    if obstacle:
        return f"torch cannot compile {obstacle}"
    owners = owners_of(module, blocks)
    if module in owners:
        return f"{type(module).__name__} calls its blocks itself, so all around them would run uncompiled"
    kinds = defaultdict(set)
    for block in blocks:
        kinds[type(block)].add(tuple((name, each.shape, each.dtype) for name, each in block.named_parameters()))
    differing = sorted(kind.__name__ for kind, alike in kinds.items() if len(alike) > 1)
    if differing:
        return f"parameters of {differing} are not alike"
    inside = {parameter: parameter.numel() for block in blocks for parameter in block.parameters()}
    around = {
        parameter: parameter.numel()
        for each in {part for owner in owners for part in owner.modules()}
        # The rows of an embedding are looked up, so there is nothing to gain from compiling that.
        if not isinstance(each, Embedding)
        for parameter in each.parameters(recurse=False)
        if parameter not in inside
    }
    if sum(around.values()) > sum(inside.values()):
        return f"blocks are the smaller part of {sorted({type(owner).__name__ for owner in owners})}"
    return None


def find_blocks(module: Module, wanted) -> List[Module]:
    """Lists the blocks of a model, outermost only, each once, in the model's order.

    Args:
        module: the model.
        wanted: True for blocks that repeat: modules of one class, with submodules and parameters, of which a
            ``ModuleList`` or a ``Sequential`` holds several. Or the names of their classes.

    Raises:
        ValueError: in a sentence, if there is none, none of a class that is named, or one that cannot be compiled.
    """
    candidates = _repeated(module) if wanted is True else _of_classes(module, set(wanted))
    found = _each_once(candidates)
    if wanted is True and not found:
        raise ValueError(
            f"compile.regional_compilation=true found no blocks that repeat in {type(module).__name__}; name their "
            "classes in a list, or set it to false"
        )
    missing = set() if wanted is True else set(wanted) - {type(block).__name__ for block in found}
    if missing:
        raise ValueError(
            f"compile.regional_compilation names {sorted(missing)}, but {type(module).__name__} has no such module "
            "outside of another block; use the names of its blocks' classes"
        )
    obstacle = _obstacle(module, found)
    if obstacle:
        raise ValueError(
            f"compile.regional_compilation cannot compile {obstacle}; name other classes, or set it to false"
        )
    return found


def _obstacle(module, blocks):
    """Says which block, or module that calls blocks, cannot be changed, and why; or returns None."""
    for changed in (*owners_of(module, blocks), *blocks):
        why = _reason_against(changed)
        if why is None and changed in blocks and _kept_from_compiler(changed):
            why = "its forward is kept from the compiler"
        if why:
            return f"{type(changed).__name__} by itself, because {why}"
    return None


def _each_once(modules):
    return list({id(module): module for module in modules}.values())


def _repeated(module):
    children = list(module.children())
    alike = [type(child) for child in children] if isinstance(module, (ModuleList, Sequential)) else []
    for child in children:
        # A lone layer such as a Linear is too little for a graph.
        whole = any(child.children()) and any(True for _ in child.parameters()) and not isinstance(child, CONTAINERS)
        if whole and alike.count(type(child)) > 1 and not _kept_from_compiler(child):
            yield child
        else:
            yield from _repeated(child)


def _of_classes(module, names):
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _of_classes(child, names)


def _kept_from_compiler(module):
    # Looked up without asking the class, whose forward may be something else, as a ScriptModule's is.
    return getattr(inspect.getattr_static(plain_class(module), "forward"), "_torchdynamo_disable", False)


def _reason_against(module):
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if plain_class(module).forward is Module.forward:
        return "it has no forward"
    try:
        subclass(plain_class(module))
    except Exception as error:
        return f"its class cannot be subclassed ({error})"
    return None


def owners_of(module: Module, blocks: List[Module]) -> List[Module]:
    """Lists the modules whose forward calls blocks: the nearest around each that has a forward of its own."""
    ids = {id(block) for block in blocks}

    def walk(parent, owner):
        owner = owner if isinstance(parent, (ModuleList, ModuleDict)) else parent
        for child in parent.children():
            if id(child) in ids:
                yield owner
            else:
                yield from walk(child, owner)

    return _each_once(walk(module, module))
