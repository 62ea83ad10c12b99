# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the blocks of a model that become graphs of their own.

A reduction learns at run time whose gradient it gets, so one graph can reduce the gradients of every layer.
"""

import contextlib
import inspect
from collections import defaultdict
from typing import Any, Dict, List, Literal, Tuple, Union

import torch
from torch._dynamo import OptimizedModule
from torch.nn import Embedding, Module, ModuleDict, ModuleList, Sequential

from .block_calls import forward_of, is_compiled

# Modules that only hold other modules. A container is not a block itself.
CONTAINERS = (ModuleList, ModuleDict, Sequential)


def choose_blocks(
    module: Module, wanted: Union[bool, List[str], None], compile_kwargs: Dict[str, Any], needed: bool = False
) -> Tuple[List[Module], str]:
    """Decides which blocks become graphs of their own.

    Args:
        wanted: the option ``compile.regional_compilation``. None chooses the blocks that repeat, if their parameters
            are alike, torch can compile the blocks, a module inside the model calls the blocks, and the blocks hold
            most of that module's parameters. The code around that module, usually head and loss, is compiled too.
        needed: whether another option works on blocks. None then chooses all blocks that repeat, as True does.

    Returns:
        The blocks, and if there are no blocks the reason why the model is compiled as a whole.

    Raises:
        ValueError: if ``wanted`` is True or a list, in the cases of :func:`find_blocks`.
    """
    if wanted is False:
        return [], "compile.regional_compilation is false"
    if wanted is not None:
        return find_blocks(module, wanted), ""
    if compile_kwargs.get("fullgraph"):
        return [], "compile_kwargs['fullgraph'] asks for one graph"
    blocks = _each_once(_repeated(module))
    why = _reason_for_whole(module, blocks, needed)
    return ([], why) if why else (blocks, "")


def _reason_for_whole(module, blocks, needed):
    """Says why the model is compiled as a whole, or returns None if ``blocks`` become graphs of their own."""
    if not blocks:
        return f"no blocks repeat in {type(module).__name__}"
    obstacle = _obstacle(module, blocks)
    if obstacle:
        return f"torch cannot compile {obstacle}"
    if needed:
        return None
    if all(is_compiled(block) for block in blocks):
        # The caller has compiled exactly these blocks, as Accelerate's regional compilation does.
        return None
    parents = parents_of(module, blocks)
    if any(parent is module for parent in parents):
        return f"{type(module).__name__} calls its blocks itself, so all around them would run uncompiled"
    kinds = defaultdict(set)
    for block in blocks:
        kinds[type(block)].add(
            tuple((name, parameter.shape, parameter.dtype) for name, parameter in block.named_parameters())
        )
    differing = sorted(kind.__name__ for kind, alike in kinds.items() if len(alike) > 1)
    if differing:
        return f"parameters of {differing} are not alike"
    inside = {parameter: parameter.numel() for block in blocks for parameter in block.parameters()}
    around = {
        parameter: parameter.numel()
        for submodule in {part for parent in parents for part in parent.modules()}
        # Do not count embeddings: compiling a lookup of rows gains nothing.
        if not isinstance(submodule, Embedding)
        for parameter in submodule.parameters(recurse=False)
        if parameter not in inside
    }
    if sum(around.values()) > sum(inside.values()):
        return f"blocks are the smaller part of {sorted({type(parent).__name__ for parent in parents})}"
    return None


def find_blocks(module: Module, wanted: Union[Literal[True], List[str]]) -> List[Module]:
    """Lists the blocks of a model, outermost only, each once, in the model's order.

    Args:
        wanted: the names of the blocks' classes, or True for blocks that repeat: modules with submodules and
            parameters in a ``ModuleList`` or a ``Sequential`` that holds several of one class.

    Raises:
        ValueError: if no block repeats, if a named class has no block, or if torch cannot compile a block by itself.
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
        repeated = sorted({type(block).__name__ for block in _repeated(module)})
        use = f"the classes that repeat there are {repeated}" if repeated else "use the names of its blocks' classes"
        raise ValueError(
            f"compile.regional_compilation names {sorted(missing)}, but {type(module).__name__} has no such module "
            f"outside of another block; {use}"
        )
    obstacle = _obstacle(module, found)
    if obstacle:
        raise ValueError(
            f"compile.regional_compilation cannot compile {obstacle}; name other classes, or set it to false"
        )
    return found


def _obstacle(module, blocks):
    """Says which block, or module that calls blocks, cannot be changed, and why; or returns None."""
    reasons = [(parent, _reason_against(parent)) for parent in parents_of(module, blocks)]
    for block in blocks:
        kept = "its forward is kept from the compiler" if _kept_from_compiler(block) else None
        reasons.append((block, _reason_against(block) or kept))
    for changed, why in reasons:
        if why:
            return f"{type(changed).__name__} by itself, because {why}"
    return None


def _each_once(modules):
    return list({id(module): module for module in modules}.values())


def _repeated(module):
    children = [_inside(child) for child in module.children()]
    alike = [type(child) for child in children] if isinstance(module, (ModuleList, Sequential)) else []
    for child in children:
        # A lone layer such as a Linear is too little for a graph.
        is_layer = not list(child.children())
        whole = not is_layer and any(True for _ in child.parameters()) and not isinstance(child, CONTAINERS)
        if whole and alike.count(type(child)) > 1 and not _kept_from_compiler(child):
            yield child
        else:
            yield from _repeated(child)


def _inside(module):
    """Returns the module that ``torch.compile(module)`` has wrapped."""
    while isinstance(module, OptimizedModule):
        module = module._orig_mod
    return module


def _of_classes(module, names):
    for child in map(_inside, module.children()):
        if type(child).__name__ in names:
            yield child
        else:
            yield from _of_classes(child, names)


def _kept_from_compiler(module):
    return getattr(forward_of(type(module)), "_torchdynamo_disable", False)


def _reason_against(module):
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if forward_of(type(module)) is Module.forward:
        return "it has no forward"
    if not _is_called_by_torch(type(module)):
        return "its __call__ does not call nn.Module's"
    if type(module)._call_impl is not Module._call_impl:
        return "it has a _call_impl of its own"
    return None


def _is_called_by_torch(kind):
    """Whether a call of a module of this class runs ``nn.Module.__call__()``, by what the class shows."""
    torchs, functions = inspect.unwrap(Module.__call__), [inspect.unwrap(kind.__call__)]
    for function in functions:
        # A class whose `__call__` delegates, as in `super().__call__(x)`, names `__call__` in its code.
        if function is torchs or "__call__" in getattr(getattr(function, "__code__", None), "co_names", ()):
            return True
        # Who wraps the `__call__` of a class has it in a closure, as DeepSpeed's offload of checkpointed inputs does.
        functions += [inner for inner in _enclosed(function) if not any(inner is known for known in functions)]
    return False


def _enclosed(function):
    """Yields the functions in a function's closure, without their decorators."""
    for cell in getattr(function, "__closure__", None) or ():
        # The cell of a variable that has no value yet raises.
        with contextlib.suppress(ValueError):
            if inspect.isfunction(cell.cell_contents):
                yield inspect.unwrap(cell.cell_contents)


def parents_of(module: Module, blocks: List[Module]) -> List[Module]:
    """Lists the modules whose forward calls blocks: for each block, the nearest module around it with a forward."""
    return [parent for parent, _ in called_by(module, blocks)]


def called_by(module: Module, blocks: List[Module]) -> List[Tuple[Module, List[Module]]]:
    """Lists the modules whose forward calls blocks, each with its blocks in the order of the model."""
    ids = {id(block) for block in blocks}

    def walk(holder, parent):
        parent = parent if isinstance(holder, (ModuleList, ModuleDict, OptimizedModule)) else holder
        for child in holder.children():
            if id(child) in ids:
                yield parent, child
            else:
                yield from walk(child, parent)

    called: Dict[Module, List[Module]] = defaultdict(list)
    for parent, block in walk(module, module):
        called[parent].append(block)
    return [(parent, _each_once(own_blocks)) for parent, own_blocks in called.items()]
