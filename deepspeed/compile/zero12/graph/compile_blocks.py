# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Each block of a model is a graph of its own, compiled once for all layers of its class.

What calls the blocks runs uncompiled, and what lies further out is compiled as ever.
"""

import inspect
import logging
from collections import defaultdict
from typing import Iterable, List

import torch
from torch.nn import Module, Parameter

from deepspeed.utils import log_dist

from .block_classes import plain_class, subclass
from .choose_blocks import owners_of
from .compilation_limit import own_code


def reducible_in_all(blocks: List[Module], parameters: Iterable[Parameter]) -> List[Parameter]:
    """Leaves out of ``parameters`` those whose like in another block of the class is not among them.

    The graph that serves all blocks of a class reduces what it reduced in the block for which it was compiled.
    """
    parameters = list(parameters)
    reducible = {id(parameter) for parameter in parameters}
    alike = defaultdict(list)
    for block in blocks:
        for name, parameter in block.named_parameters(remove_duplicate=False):
            alike[type(block), name].append(parameter)
    left_out = set()
    for group in alike.values():
        # One that is frozen has another graph compiled for its block.
        trained = [id(parameter) for parameter in group if parameter.requires_grad]
        if not reducible.issuperset(trained):
            left_out.update(trained)
    return [parameter for parameter in parameters if id(parameter) not in left_out]


def compile_blocks(module: Module, blocks: List[Module], backend, compile_kwargs, limit, waiting=None) -> List[Module]:
    """Has each block's forward compiled, one graph for all blocks of a class; what calls the blocks stays eager.

    Modules get a class of their own, as FSDP2 does with those that it shards; copies of them have the class they had
    before. Hooks and checkpointing stay outside of the graphs.

    Args:
        module: the model.
        blocks: what :func:`choose_blocks` returned.
        backend: of ``torch.compile``.
        compile_kwargs: further arguments of ``torch.compile``.
        limit: the ``CompilationLimit`` of ``backend``.
        waiting: None, or a ``Waiting`` that is told before all these forwards, and behind those of what calls blocks.

    Returns:
        The modules that were changed, for :func:`restore`.
    """
    owners, classes = owners_of(module, blocks), {}
    for owner in owners:
        # A compiler that followed it to the blocks would look into each of them, again and again, and some models
        # ask whether they are traced: attention then gets a mask in memory instead of the word "causal".
        plain = type(owner)
        classes[plain] = subclass(plain, forward=_uncompiled(plain.forward, waiting))
    for plain in {type(block): None for block in blocks}:
        classes[plain] = subclass(
            plain,
            forward=_compiled(plain.forward, backend, compile_kwargs, limit, waiting),
            # For code other than the owner's.
            __call__=torch.compiler.disable(plain.__call__),
        )
    # Only when there is a class for each: a model is changed as a whole or not at all.
    changed = [*owners, *blocks]
    for each in changed:
        each.__class__ = classes[type(each)]
    return changed


def _uncompiled(forward, waiting):
    if waiting is None:
        return torch.compiler.disable(forward)

    def method(self, *args, **kwargs):
        waiting.enter(self)
        output = forward(self, *args, **kwargs)
        waiting.leave()
        return output

    method.__signature__ = inspect.signature(forward)
    return torch.compiler.disable(method)


def _compiled(forward, backend, compile_kwargs, limit, waiting):
    # torch.compile takes entries out of the options that it is given.
    options = compile_kwargs.get("options")
    own = {**compile_kwargs, "options": dict(options)} if options is not None else dict(compile_kwargs)
    # The limit is kept for all ranks.
    own.pop("recompile_limit", None)
    compiled = torch.compile(own_code(forward), **{**own, "backend": backend})

    # Without the marks of torch.compile, by which the compiler would take this method for the one that it compiles:
    # layers of transformers compare the two to see which of them is to checkpoint.
    def method(self, *args, **kwargs):
        if waiting is not None:
            waiting.enter(self)
        return limit.call_block(self, compiled, forward, args, kwargs)

    method.__signature__ = inspect.signature(forward)
    return method


def take_over_compiled(modules: Iterable[Module]) -> None:
    """Has these modules run as if their ``compile()`` had never been called: their graphs would reduce nothing."""
    compiled = [each for each in modules if getattr(each, "_compiled_call_impl", None) is not None]
    if compiled:
        names = sorted({plain_class(each).__name__ for each in compiled})
        log_dist(
            f"DeepCompile compiles {len(compiled)} modules of {names} itself that were compiled before; what their "
            "compile() was given has no effect, so give it to engine.compile()",
            ranks=[0],
            level=logging.WARNING,
        )
    for each in compiled:
        each._compiled_call_impl = None


def refuse_blocks_of_others(module: Module) -> None:
    """Raises ValueError if an engine that trains other parameters has compiled parts of this model."""
    for each in module.modules():
        if type(each) is not plain_class(each):
            raise ValueError(
                f"{type(each).__name__} is compiled for an engine that trains other parameters of the model; destroy "
                "that one first, or set compile.regional_compilation to false for it"
            )


def restore(modules: List[Module]) -> None:
    """Undoes :func:`compile_blocks`."""
    for module in modules:
        module.__class__ = plain_class(module)
