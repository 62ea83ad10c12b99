# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Compiles each block of a model as a graph of its own, once for all layers of the block's class.

Modules that call blocks run uncompiled. The code around these modules is compiled as usual.
"""

import contextlib
import functools
from types import CodeType
from typing import Any, Callable, Dict, List, Optional, Tuple, Type

import torch
from torch.nn import Module

from ...zero_1_and_2.graph.backend import own_code
from .block_calls import BlockCall, BlockParentCall, Call, ModuleCall, forward_of, run_forward, runs
from .choose_blocks import parents_of
from .compilation_limit import CompilationLimit


def compile_blocks(
    module: Module,
    blocks: List[Module],
    backend: Callable,
    compile_kwargs: Dict[str, Any],
    limit: CompilationLimit,
    undo: contextlib.ExitStack,
) -> None:
    """Compiles each block's forward, with one graph for all blocks of a class. Modules that call blocks stay eager.

    Each changed module gets a :class:`Call`, and a module that calls blocks also gets a hook. Hooks and checkpointing
    stay outside the graphs.

    Args:
        undo: gets the functions that remove each :class:`Call`.
    """
    compiled = _CompiledForwards(backend, compile_kwargs)
    # Read all options before changing modules: a model is changed as a whole or not at all.
    for kind in {type(block): None for block in blocks}:
        compiled.of(kind)
    calls: List[Call] = [BlockParentCall(parent, limit) for parent in parents_of(module, blocks)]
    calls.extend(BlockCall(block, compiled.of, limit) for block in blocks)
    for call in calls:
        undo.callback(call.take_out)
        call.put_in()


def compile_module(
    module: Module, limit: CompilationLimit, undo: contextlib.ExitStack, compile_kwargs: Dict[str, Any]
) -> None:
    """Compiles a module as ``module.compile(**compile_kwargs)`` does, but within a limit, until ``undo`` ends.

    Does nothing if the module calls blocks, because it runs uncompiled then.
    """
    if isinstance(module._compiled_call_impl, BlockParentCall):
        return

    def call(*args, **kwargs):
        return module._call_impl(*args, **kwargs)

    whole = ModuleCall(module, torch.compile(own_code(call), **_for_torch(compile_kwargs)), limit)
    undo.callback(whole.take_out)
    whole.put_in()


def _for_torch(compile_kwargs):
    """Returns arguments of ``torch.compile``. The engine's limit of compilations takes the place of torch's own."""
    own = {name: value for name, value in compile_kwargs.items() if name != "recompile_limit"}
    if own.get("options") is not None:
        # torch.compile removes entries from the dict that it is given, which the caller may use again.
        own["options"] = dict(own["options"])
    return own


class _CompiledForwards:
    """The compiled forwards of blocks: one for each class and each forward that blocks of the class have had."""

    def __init__(self, backend: Callable, compile_kwargs: Dict[str, Any]):
        self._backend, self._compile_kwargs = backend, compile_kwargs
        # (class, id of a forward) -> the compiled function, and the forward, which keeps its id from being reused.
        self._made: Dict[Tuple[Type[Module], int], Tuple[Callable, Any]] = {}

    def of(self, kind: Type[Module], function: Optional[Callable] = None) -> Callable:
        """Returns the compiled forward of a class of blocks, or ``function`` compiled for this class.

        The result takes the block and the inputs.
        """
        compiled = forward_of(kind) if function is None else function
        made = self._made.get((kind, id(compiled)))
        if made is None:
            run = run_forward if function is None else runs(function)
            made = self._made[kind, id(compiled)] = self._compile(kind, run), compiled
        return made[0]

    def _compile(self, kind, run):
        backend = functools.partial(self._backend, layer=kind.__name__)
        return torch.compile(own_code(run), **{**_for_torch(self._compile_kwargs), "backend": backend})


def calls_blocks(code: CodeType) -> bool:
    """Whether a frame's code is that which calls the blocks of a class. Layers with frozen parameters share it."""
    return code.co_filename == run_forward.__code__.co_filename


def refuse_blocks_of_others(module: Module) -> None:
    """Raises ValueError if an engine that trains other parameters has compiled parts of this model."""
    for submodule in module.modules():
        if isinstance(submodule._compiled_call_impl, (BlockCall, BlockParentCall)):
            raise ValueError(
                f"{type(submodule).__name__} is compiled by another engine, which trains other parameters of this "
                "model; destroy that engine, or set compile.regional_compilation to false for that engine"
            )
