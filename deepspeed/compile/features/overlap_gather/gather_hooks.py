# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes a model wait for parameters that an ``OverlappedGather`` still sends.

The unit ``OUTSIDE`` is sent first, then the unit of each block. The next forward waits for a block's unit when the
forward reaches the block. No hook sees reads such as ``parameter.clone()`` between a step and the next forward: before
such a read, the caller must call ``wait_for_parameters()``.
"""

import itertools
from typing import TYPE_CHECKING, Callable, Dict, Iterable, List, Optional, Set, Tuple

import torch
from torch.nn import Module, Parameter

from deepspeed.utils import logger

from ...zero_1_and_2.gradient.layout import registered_parameters
from ...zero_1_and_2.hooks import Hook
from ..blocks.parameters import by_block, modules_outside
from .gather import OverlappedGather

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# The number of the unit of all parameters that lie outside the blocks or in several blocks.
OUTSIDE = 0


class ParameterArrivals:
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
        outside = {id(submodule) for submodule in modules_outside(module, blocks)}
        for submodule in module.modules():
            if isinstance(submodule, torch.jit.ScriptModule):
                # A ScriptModule takes no hooks. The engine's forward and the modules around the ScriptModule wait too.
                continue
            self._hooks.append(submodule.register_state_dict_pre_hook(outside_graphs(self.leave)))
            self._hooks.append(submodule.register_load_state_dict_pre_hook(outside_graphs(self.leave)))
            own = self.gather.units_of(submodule.parameters(recurse=False))
            if id(submodule) in outside and (own or submodule is module):
                # Run before other hooks: they may compute with parameters, as the hook of weight_norm() does.
                self._hooks.append(submodule.register_forward_pre_hook(outside_graphs(self.begin), prepend=True))

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

    def around_call(self, module: Module, blocks: Optional[List[Module]], call: Callable) -> Callable:
        """Returns the call of a block (``blocks`` is None) or of a module that calls blocks, around another call."""
        key = id(module)
        units = self._units_of_block.get(key, [])

        def call_block(block, /, *args, **kwargs):
            """Waits for the block's unit."""
            self._called.add(key)
            self.gather.wait(units)
            return call(block, *args, **kwargs)

        def call_caller(caller, /, *args, **kwargs):
            """Waits for the unit ``OUTSIDE`` before, and for all units behind."""
            self.begin()
            output = call(caller, *args, **kwargs)
            self.leave()
            return output

        return call_block if blocks is None else call_caller

    def leave(self) -> None:
        """Called after the forward of a module that calls blocks: waits for all units."""
        self.gather.wait_all()

    def around_graph(self, inputs: Iterable, run: Callable) -> Callable:
        """Returns what waits for the parameters among a graph's ``inputs`` before each run of the graph."""
        units = sorted(self.gather.units_of(value for value in inputs if isinstance(value, Parameter)))

        def wait_and_run(*args):
            self.gather.wait(units)
            return run(*args)

        return wait_and_run if units else run

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            self.gather.wait_all()
        except RuntimeError as error:
            logger.warning(f"The engine is destroyed, but parameters of the last step did not arrive: {error}")


def outside_graphs(wait: Callable) -> Hook:
    """Returns a hook that calls ``wait()``, but not in a compiled graph: ``around_graph()`` waits there."""

    def hook(*_):
        if not torch.compiler.is_compiling():
            wait()

    return Hook(hook)
