# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Compiles each block of a model by itself, and limits how often code is compiled again."""

import weakref
from typing import TYPE_CHECKING, Callable, Iterator, List, Tuple

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.nn import Module

from deepspeed.utils import logger

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.gradient.registered import registered_parameters
from ...zero_1_and_2.messages import warn
from . import compile_blocks
from .block_calls import Around, ModuleCall, take_over_compiled
from .choose_blocks import called_by, choose_blocks, parents_of
from .compilation_limit import LIMIT_OF_TORCH, CompilationLimit, graph_break
from .guards import guard_all, guard_defaults
from .options import set_for_blocks
from .parameters import partially_trained_lookalikes

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ...zero_1_and_2.graph.backend import Frame

_LEFT = (
    "DeepCompile leaves the gradients of {} parameters to autograd: layers that look alike share graphs, and the "
    "optimizer lacks a trained parameter of some; give it these too, or set their requires_grad to false"
)
_chosen: "weakref.WeakKeyDictionary[Request, Tuple[List[Module], str]]" = weakref.WeakKeyDictionary()


def chosen_blocks(request: Request) -> Tuple[List[Module], str]:
    """Returns the result of :func:`choose_blocks` for the user's request. The blocks are chosen once.

    Raises:
        ValueError: as :func:`choose_blocks` does.
    """
    if request not in _chosen:
        wanted = request.options.regional_compilation
        needed = bool(set_for_blocks(request.options))
        _chosen[request] = choose_blocks(request.engine.module, wanted, request.compile_kwargs, needed)
    return _chosen[request]


class Blocks(Feature):
    """The blocks of one engine, each with its call. Without blocks, the module is compiled as a whole."""

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        if request.options.regional_compilation and request.compile_kwargs.get("fullgraph"):
            yield (
                "compile_kwargs['fullgraph'] contradicts compile.regional_compilation, which makes a graph of every "
                "block; leave one of them out"
            )
        try:
            blocks, why = chosen_blocks(request)
        except ValueError as error:
            yield str(error)
            return
        advice = "name its blocks' classes in compile.regional_compilation, or leave this out"
        if request.compile_kwargs.get("fullgraph"):
            advice = "leave one of them out"
        for name in () if blocks else set_for_blocks(request.options):
            yield f"compile.{name} works on blocks, and the model is compiled as a whole, because {why}; {advice}"

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        yield from _hooks_that_end_graphs(request.engine.module, chosen_blocks(request)[0])

    def __init__(self, context: SetUpContext):
        module, compile_kwargs, undo = context.module, context.request.compile_kwargs, context.undo
        compile_blocks.refuse_blocks_of_others(module)
        take_over_compiled(submodule for submodule in module.modules() if submodule is not module)
        left = partially_trained_lookalikes(module, registered_parameters(context.optimizer))
        if left:
            warn(_LEFT.format(len(left)))
        context.backend.left_to_autograd.update(map(id, left))
        blocks, why_whole = chosen_blocks(context.request)
        self._module, self._blocks = weakref.ref(module), [weakref.ref(block) for block in blocks]
        guard_defaults()
        context.backend.compiled_modules = 1 + len(blocks)
        # All blocks of a class share one frame and its limit, so allow each block as many compilations as a frame.
        limit, name = compile_kwargs.get("recompile_limit"), "compile_kwargs['recompile_limit']"
        if limit is None:
            limit, name = torch._dynamo.config.recompile_limit * max(len(blocks), 1), LIMIT_OF_TORCH
        self._limit = CompilationLimit(module, limit, bool(compile_kwargs.get("fullgraph")), name)
        if blocks:
            names = sorted({type(block).__name__ for block in blocks})
            logger.info(f"DeepCompile makes one graph for all {len(blocks)} blocks of each class of {names}")
            compile_blocks.compile_blocks(module, blocks, context.backend, compile_kwargs, self._limit, undo)
        else:
            logger.info(f"DeepCompile compiles the model as a whole, because {why_whole}")
        compile_blocks.compile_module(module, self._limit, undo, {**compile_kwargs, "backend": context.backend})
        # warnings() has already warned of the current hooks.
        self._warned_of_hooks = any(_hooks_that_end_graphs(module, blocks))
        self._compilations = 0

    @property
    def blocks(self) -> List[Module]:
        return [block for reference in self._blocks if (block := reference()) is not None]

    def in_training(self) -> bool:
        """As :meth:`CompilationLimit.in_training`."""
        return self._limit.in_training()

    def wrap_calls(self, around: Around, always: bool = False) -> None:
        """Puts a call around each call of a block, and of a module that calls blocks. Earlier wrappers stay inside.

        Args:
            around: makes the outer call of the inner one.
            always: whether the call also surrounds blocks that checkpointing computes again, and blocks that the
                caller's own compiled code calls.
        """
        blocks = self.blocks
        for parent, called in called_by(self._module(), blocks):
            vars(parent)["_compiled_call_impl"].wrap(around, called)
        for block in blocks:
            vars(block)["_compiled_call_impl"].wrap(around, always)

    def wrap_module(self, around: Callable[[Callable], Callable]) -> None:
        """Puts a call around each call of the engine's module, unless that module itself calls blocks."""
        call = vars(self._module())["_compiled_call_impl"]
        if isinstance(call, ModuleCall):
            call.wrap(around)

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        guard_all()
        compile_id = torch._guards.CompileContext.current_compile_id()
        compilations, what = compile_id.frame_compile_id + 1, frame.layer or "the model"
        code = InstructionTranslator.current_tx().f_code
        if frame.parameters or compile_blocks.calls_blocks(code):
            self._limit.compiles(compile_id.frame_id, compilations, what, graph_break(frame.gm))
        else:
            self._limit.compiles_beside(compile_id.frame_id, code, what)
        return compiled()

    def after_step(self, engine: "DeepSpeedEngine") -> None:
        self._limit.stop_if_exceeded()
        if self._warned_of_hooks:
            return
        # A later hook makes Dynamo compile again. Look for hooks only after a compilation: a model has many modules.
        compilations = sum(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values())
        module = self._module()
        if compilations != self._compilations and module is not None:
            self._compilations = compilations
            for sentence in _hooks_that_end_graphs(module, self.blocks):
                self._warned_of_hooks = True
                warn(f"DeepCompile: {sentence}")


FEATURE = Blocks


def _hooks_that_end_graphs(module, blocks):
    """Yields a sentence if modules have full backward hooks, at which torch ends graphs."""
    if torch._dynamo.config.compiled_autograd:
        return
    # A module that calls blocks runs uncompiled, and hooks of a block itself run outside of the block's graph.
    uncompiled = {id(part) for parent in parents_of(module, blocks) for part in parent.modules()}
    traced = {id(submodule) for submodule in module.modules()} - uncompiled
    traced |= {id(submodule) for block in blocks for submodule in block.modules() if submodule is not block}
    hooked = [
        name or type(submodule).__name__
        for name, submodule in module.named_modules()
        if id(submodule) in traced and (submodule._backward_hooks or submodule._backward_pre_hooks)
    ]
    if hooked:
        yield (
            f"the full backward hooks of {hooked[0]} ({len(hooked)} modules have such hooks) end the graphs around it "
            "and keep a forward that calls it in a loop from being compiled, as under torch.compile alone; use hooks "
            "of tensors, in a forward hook, instead"
        )
