# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes a model wait for parameters that an ``OverlappedGather`` still sends.

The unit ``OUTSIDE`` is sent first, then the unit of each block. The next forward waits for a block's unit when the
forward reaches the block. No hook sees reads such as ``parameter.clone()`` between a step and the next forward: before
such a read, the caller must call ``wait_for_parameters()``.
"""

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Callable, Dict, Iterable, List, Optional, Set, Tuple

import torch
from torch.nn import Module, Parameter

from deepspeed.utils import logger

from .gather import OverlappedGather
from .hooks import Hook
from .layout import registered_parameters

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# The number of the unit of all parameters that lie outside the blocks or in several blocks.
OUTSIDE = 0


class Waiting:
    """Makes a model wait for parameters that are on their way, wherever the model uses them.

    The engine's forward waits for the unit ``OUTSIDE`` before the forward begins, and each block waits for its own
    unit. All parameters are complete when the last block has run, and when a state dict is read or loaded. If the
    caller calls the module without its engine, the modules outside the blocks wait when they are called, and graphs
    wait when they run.

    Code that reads a block's parameters without calling the block, as ``block.forward(x)`` does, waits for nothing.
    Before it begins, the engine's forward therefore waits for every block that the previous forward of this kind did
    not call. Only blocks that it did call wait when reached.

    Args:
        optimizer: a ZeRO-1/2 optimizer.
        module: the model.
        blocks: its blocks.
    """

    def __init__(self, optimizer: "DeepSpeedZeroOptimizer", module: Module, blocks: List[Module]):
        self.gather = OverlappedGather(optimizer, by_block(registered_parameters(optimizer), module, blocks))
        self._units_of_block = {id(block): sorted(self.gather.units_of(block.parameters())) for block in blocks}
        self._hooks = []
        # Which blocks the forward under way has called, and (whether the module trains, whether gradients are
        # recorded) -> which blocks the last such forward has called. Evaluation may call other blocks than training.
        self._called: Set[int] = set()
        self._called_last: Dict[Tuple[bool, bool], Set[int]] = {}
        self._first = [OUTSIDE, *range(1, 1 + len(blocks))]
        outside = {id(each) for each in _modules_outside(module, blocks)}
        for each in module.modules():
            if isinstance(each, torch.jit.ScriptModule):
                # A ScriptModule takes no hooks. The engine's forward and the modules around the ScriptModule wait too.
                continue
            self._hooks.append(each.register_state_dict_pre_hook(_outside_graphs(self.leave)))
            self._hooks.append(each.register_load_state_dict_pre_hook(_outside_graphs(self.leave)))
            own = self.gather.units_of(each.parameters(recurse=False))
            if id(each) in outside and (own or each is module):
                # Run before other hooks: they may compute with parameters, as the hook of weight_norm() does.
                self._hooks.append(each.register_forward_pre_hook(_outside_graphs(self.begin), prepend=True))

    def forward_begins(self, training: bool) -> None:
        """Called before a forward of the engine: waits as :meth:`begin`, and for all blocks that may not wait.

        Args:
            training: whether the module is in training mode.
        """
        kind = training, torch.is_grad_enabled()
        called, self._called = self._called_last.get(kind, set()), set()
        self._called_last[kind] = self._called
        others = [units for block, units in self._units_of_block.items() if block not in called]
        self._first = sorted({OUTSIDE, *itertools.chain.from_iterable(others)})
        self.begin()

    def begin(self) -> None:
        """Called before a forward: waits for the unit ``OUTSIDE``."""
        self.gather.wait(self._first)

    def enter(self, module: Module) -> None:
        """Called before the forward of a block (waits for its unit) or of a module that calls blocks (``OUTSIDE``)."""
        units = self._units_of_block.get(id(module))
        if units is None:
            self.begin()
        else:
            self._called.add(id(module))
            self.gather.wait(units)

    def leave(self) -> None:
        """Called after the forward of a module that calls blocks: waits for all units."""
        self.gather.wait_all()

    def before_graph(self, inputs: Iterable) -> Optional[Callable[[], None]]:
        """Returns a function to call before each run of a graph, which waits for parameters among ``inputs``.

        Returns None if the graph has no parameter to wait for.
        """
        units = sorted(self.gather.units_of(value for value in inputs if isinstance(value, Parameter)))
        return (lambda: self.gather.wait(units)) if units else None

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            self.gather.wait_all()
        except RuntimeError as error:
            logger.warning(f"The engine is destroyed, but parameters of the last step did not arrive: {error}")


def _outside_graphs(wait):
    """Returns a hook that calls ``wait()``, but not in a compiled graph: ``before_graph()`` waits there."""

    def hook(*_):
        if not torch.compiler.is_compiling():
            wait()

    return Hook(hook)


def _modules_outside(module, blocks):
    inside = {id(each) for block in blocks for each in block.modules()}
    return [each for each in module.modules() if id(each) not in inside]


def by_block(parameters: Iterable[Parameter], module: Module, blocks: List[Module]) -> List[List[Parameter]]:
    """Lists those of ``parameters`` of the unit ``OUTSIDE``, then those that each block holds alone.

    ``parameters`` may hold others than those of the module, as an optimizer may.
    """
    outside = {
        id(parameter) for each in _modules_outside(module, blocks) for parameter in each.parameters(recurse=False)
    }
    holders = defaultdict(set)
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            holders[id(parameter)].add(index)
    units = [[] for _ in range(1 + len(blocks))]
    for parameter in parameters:
        held_by = holders[id(parameter)]
        alone = len(held_by) == 1 and id(parameter) not in outside
        units[1 + next(iter(held_by)) if alone else OUTSIDE].append(parameter)
    return units
