# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Regional compilation: each repeated block of a model is a graph of its own, compiled once for all of its layers.

A reduction learns at run time which parameter it is for, so one graph reduces every layer's gradients. What lies
outside of the blocks is compiled as ever, in graphs that end where a block begins.
"""

import inspect
from typing import List

import torch
from torch.nn import Module, ModuleList, Sequential


def find_blocks(module: Module, wanted) -> List[Module]:
    """Lists the blocks of a model, outermost only, in the model's order.

    Args:
        module: the model.
        wanted: True for blocks that repeat: modules of one class, with submodules and parameters, of which a
            ``ModuleList`` or a ``Sequential`` holds several. Or the names of their classes.

    Raises:
        ValueError: in a sentence, if there is none, or none of a class that is named.
    """
    found = list(_repeated(module) if wanted is True else _of_classes(module, set(wanted)))
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
    return found


def _repeated(module):
    children = list(module.children())
    alike = [type(child) for child in children] if isinstance(module, (ModuleList, Sequential)) else []
    for child in children:
        # A lone layer such as a Linear is too little for a graph.
        if alike.count(type(child)) > 1 and any(child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _repeated(child)


def _of_classes(module, names):
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _of_classes(child, names)


def _owners(module, blocks):
    """Yields the modules whose forward calls blocks: the nearest around each that has a forward of its own."""
    ids = {id(block) for block in blocks}

    def walk(parent, owner):
        owner = owner if isinstance(parent, ModuleList) else parent
        for child in parent.children():
            if id(child) in ids:
                yield owner
            else:
                yield from walk(child, owner)

    return {id(owner): owner for owner in walk(module, module)}.values()


def compile_regions(module: Module, blocks: List[Module], backend, compile_kwargs) -> List[Module]:
    """Has each block's forward compiled, one graph for all blocks of a class; what calls the blocks stays eager.

    Modules get a class of their own, as FSDP2 does with those that it shards; copies of them have the class they had
    before. Hooks and checkpointing stay outside of the graphs.

    Args:
        module: the model.
        blocks: what :func:`find_blocks` returned.
        backend: of ``torch.compile``.
        compile_kwargs: further arguments of ``torch.compile``.

    Returns:
        The modules that were changed, for :func:`restore`.
    """
    owners = list(_owners(module, blocks))
    for owner in owners:
        # A compiler that followed it to the blocks would look into each of them, again and again, and some models
        # ask whether they are traced: attention then gets a mask in memory instead of the word "causal".
        owner.__class__ = _subclass(type(owner), forward=torch.compiler.disable(type(owner).forward))
    classes = {}
    for block in blocks:
        plain = type(block)
        if plain not in classes:
            classes[plain] = _subclass(
                plain,
                forward=_compiled(plain.forward, {**compile_kwargs, "backend": backend}),
                # For code other than the owner's.
                __call__=torch.compiler.disable(plain.__call__),
            )
        block.__class__ = classes[plain]
    return [*owners, *blocks]


def _compiled(forward, compile_kwargs):
    compiled = torch.compile(forward, **compile_kwargs)

    # Without the marks of torch.compile, by which the compiler would take this method for the one that it compiles:
    # layers of transformers compare the two to see which of them is to checkpoint.
    def method(self, *args, **kwargs):
        return compiled(self, *args, **kwargs)

    method.__signature__ = inspect.signature(forward)
    return method


def _subclass(plain, **members):
    def as_plain(self, protocol):
        # A copy belongs to no engine, whose graphs would reduce its gradients.
        function, arguments, *rest = plain.__reduce_ex__(self, protocol)
        return function, tuple(plain if argument is type(self) else argument for argument in arguments), *rest

    kept = {"class_before_regions": plain, "__module__": plain.__module__, "__reduce_ex__": as_plain}
    return type(plain.__name__, (plain,), {**kept, **members})


def restore(modules: List[Module]) -> None:
    """Undoes :func:`compile_regions`."""
    for module in modules:
        module.__class__ = type(module).class_before_regions
