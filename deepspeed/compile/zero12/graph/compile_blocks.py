# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Compiles each block of a model as a graph of its own, once for all layers of the block's class.

Modules that call blocks run uncompiled. The code around these modules is compiled as usual.
"""

import inspect
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional

import torch
from torch.nn import Module, Parameter

from ..messages import warn
from .block_classes import plain_class, subclass
from .choose_blocks import callers_of
from .compilation_limit import CompilationLimit, own_code

if TYPE_CHECKING:
    from ..gather_hooks import Waiting


def reducible_in_all(blocks: List[Module], parameters: Iterable[Parameter]) -> List[Parameter]:
    """Returns those of ``parameters`` that are reducible in all blocks of their class.

    One graph serves all blocks of a class, so a parameter of a block is left out if ``parameters`` lacks the parameter
    of the same name in another block of the class.
    """
    parameters = list(parameters)
    reducible = {id(parameter) for parameter in parameters}
    alike = defaultdict(list)
    for block in blocks:
        for name, parameter in block.named_parameters(remove_duplicate=False):
            alike[type(block), name].append(parameter)
    left_out = set()
    for group in alike.values():
        # Frozen parameters do not count: a block with another set of frozen parameters gets another graph.
        trained = [id(parameter) for parameter in group if parameter.requires_grad]
        if not reducible.issuperset(trained):
            left_out.update(trained)
    return [parameter for parameter in parameters if id(parameter) not in left_out]


def compile_blocks(
    module: Module,
    blocks: List[Module],
    backend: Callable[[str], Any],
    compile_kwargs: Dict[str, Any],
    limit: CompilationLimit,
    waiting: Optional["Waiting"] = None,
) -> List[Module]:
    """Compiles each block's forward, with one graph for all blocks of a class. Modules that call blocks stay eager.

    Each changed module gets a subclass of its class, as FSDP2 does with the modules that it shards. A copy of a
    changed module has the former class. Hooks and checkpointing stay outside the graphs.

    Args:
        module: the model.
        blocks: what :func:`choose_blocks` returned.
        backend: returns the backend for ``torch.compile``, given the name of a class of blocks.
        compile_kwargs: further arguments of ``torch.compile``.
        limit: the ``CompilationLimit`` of ``backend``.
        waiting: None, or a ``Waiting``. A changed module calls ``enter()`` before its forward, and a module that calls
            blocks also calls ``leave()`` after its forward.

    Returns:
        The modules that were changed, for :func:`restore`.
    """
    callers, classes = callers_of(module, blocks), {}
    for caller in callers:
        # If the compiler traced the caller, it would trace into each block again and again. Also, some models ask
        # whether they are traced, and attention then gets a mask in memory instead of the word "causal".
        plain = type(caller)
        classes[plain] = subclass(plain, forward=_uncompiled(plain.forward, waiting))
    for plain in {type(block): None for block in blocks}:
        classes[plain] = subclass(
            plain,
            forward=_compiled(plain.forward, backend(plain.__name__), compile_kwargs, limit, waiting),
            # Code other than the caller may be compiled and call a block: keep the block out of that code's graph.
            __call__=torch.compiler.disable(plain.__call__),
        )
    # Change modules only after all classes were made: a model is changed as a whole or not at all.
    changed = [*callers, *blocks]
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

    method.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return torch.compiler.disable(method)


def _compiled(forward, backend, compile_kwargs, limit, waiting):
    # Copy the options, because torch.compile removes entries from the dict that it is given.
    options = compile_kwargs.get("options")
    own = {**compile_kwargs, "options": dict(options)} if options is not None else dict(compile_kwargs)
    # `limit` counts compilations in place of torch.compile.
    own.pop("recompile_limit", None)
    compiled = torch.compile(own_code(forward), **{**own, "backend": backend})

    # Do not give this method the attributes that torch.compile gives `compiled`. With these attributes, the compiler
    # would take this method for `forward`, and layers of transformers compare the two to find out which one
    # checkpoints.
    def method(self, *args, **kwargs):
        if waiting is not None:
            waiting.enter(self)
        return limit.call_block(self, compiled, forward, args, kwargs)

    method.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return method


def take_over_compiled(modules: Iterable[Module]) -> None:
    """Makes ``modules`` run as if their ``compile()`` had never been called: their graphs would reduce nothing."""
    compiled = [each for each in modules if getattr(each, "_compiled_call_impl", None) is not None]
    if compiled:
        names = sorted({plain_class(each).__name__ for each in compiled})
        warn(
            f"DeepCompile compiles {len(compiled)} modules of {names} itself that were compiled before; what their "
            "compile() was given has no effect, so give it to engine.compile()"
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
