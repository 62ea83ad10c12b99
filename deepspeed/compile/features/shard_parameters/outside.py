# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Large trained parameters that no block holds, such as an embedding and a head (``compile.shard_parameters: "all"``).

Each is a unit of its own. Code around blocks reads these parameters, and most of that code is compiled. Dynamo must
not meet a parameter at rest, so units are gathered before such code runs, and not where it reads them:

- Embeddings are gathered when a forward of the engine begins. The first blocks take their place, because the backward
  of a lookup reads no weight.
- Parameters of modules that lie around the modules that call blocks, such as the head, are gathered when the latter
  have run. They stay until the backward comes to the last block.
- Layers beside blocks, within the module that calls these, have a place among the blocks in its passes
  (``gather_order.py``).
- Code that is not compiled gathers what it reads: a module when it is called, a parameter when a function gets it.
"""

import contextlib
import functools
from collections import defaultdict
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Set, Tuple

import torch
from torch.nn import Embedding, Module, Parameter
from torch.utils.hooks import RemovableHandle

from ...fixes.base.subclasses import plain_tensors
from ...zero_1_and_2.hooks import Hook
from ..blocks.choose_blocks import parents_of
from ..blocks.parameters import held_by_scripts, modules_outside
from .gather_order import GatherOrder
from .unit import Unit
from .whole_units import WholeUnits

# A parameter with at least this part of the largest block's bytes is not kept whole on every rank.
LARGE_PART = 1 / 8


def large_outside(parameters: List[Parameter], module: Module, blocks: List[Module]) -> List[Parameter]:
    """Lists those of ``parameters`` that are large and that a module outside of blocks holds, and no block."""
    sizes = (sum(tensor.nbytes for tensor in plain_tensors(block.parameters())) for block in blocks)
    smallest = max(LARGE_PART * max(sizes, default=0), 1)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    holders = _holders(module, blocks)
    return [
        parameter
        for parameter in parameters
        if id(parameter) in holders and id(parameter) not in inside and parameter.nbytes >= smallest
    ]


def _holders(module, blocks) -> Dict[int, List[Module]]:
    """Returns id of a parameter -> the modules outside of blocks that hold it themselves.

    Parameters that a ScriptModule holds are left out.
    """
    holders, scripted = defaultdict(list), held_by_scripts(module)
    for submodule in modules_outside(module, blocks):
        for parameter in submodule.parameters(recurse=False):
            if id(parameter) not in scripted:
                holders[id(parameter)].append(submodule)
    return holders


def read_times(
    parameters: Iterable[Parameter], module: Module, blocks: List[Module]
) -> Tuple[List[Parameter], List[Parameter]]:
    """Lists those of ``parameters`` that are read before blocks, and those that are read after them.

    The former belong to embeddings, and the latter to modules around those that call blocks, such as a head.
    """
    holders = _holders(module, blocks)
    within = {id(part) for parent in parents_of(module, blocks) for part in parent.modules()}
    first = [weight for weight in parameters if any(isinstance(holder, Embedding) for holder in holders[id(weight)])]
    return first, [weight for weight in parameters if any(id(holder) not in within for holder in holders[id(weight)])]


def _beside_blocks(parameters, module, blocks):
    """Yields (the module that calls blocks, a layer beside these, its parameter).

    Embeddings are left out, and parameters that several modules hold, or that the former module holds itself: it may
    read these anywhere. So are layers with or within another one's large parameter, such as ``MultiheadAttention``:
    they read several together.
    """
    callers = sorted(parents_of(module, blocks), key=lambda caller: len(list(caller.modules())), reverse=True)
    # If callers lie within each other, take the innermost one.
    caller_of = {id(part): caller for caller in callers for part in caller.modules() if part not in callers}
    holders = _holders(module, blocks)
    for parameter in parameters:
        layer, *others = holders[id(parameter)]
        if others or id(layer) not in caller_of or isinstance(layer, Embedding):
            continue
        near = [
            other
            for other in parameters
            if any(layer in holder.modules() or holder in layer.modules() for holder in holders[id(other)])
        ]
        if len(near) == 1:
            yield caller_of[id(layer)], layer, parameter


class OutsideUnits:
    """Gathers the units of large parameters outside of blocks when they are needed.

    Args:
        whole: gathers and reshards units.
        module, blocks: the model, and its blocks.
        units: parameter -> its unit.
        reach: gathers a unit in the pass that is under way, and returns whether the unit has a place there.

    Attributes:
        beside: id of a module that calls blocks -> id of a layer beside these -> the layer's units.
    """

    def __init__(
        self,
        whole: WholeUnits,
        module: Module,
        blocks: List[Module],
        units: Dict[Parameter, Unit],
        reach: Callable[[Unit], bool],
    ):
        self._whole, self._units, self._reach = whole, list(units.values()), reach
        self.beside: Dict[int, Dict[int, List[Unit]]] = defaultdict(lambda: defaultdict(list))
        for caller, layer, parameter in _beside_blocks(units, module, blocks):
            self.beside[id(caller)][id(layer)].append(units[parameter])
        # The units to gather when a forward begins, and those to gather when the modules that call blocks have run.
        self._first, self._last = ([units[weight] for weight in read] for read in read_times(units, module, blocks))
        # How many calls of the model are under way, and whether blocks have run in the last one.
        self._forwards = 0
        self._have_blocks_run = False
        # Units of blocks that code around the modules that call blocks has read in the forward that is under way.
        self._of_blocks: Set[Unit] = set()
        self._hooks: List[RemovableHandle] = []
        gathers = {parameter: functools.partial(self.gather, unit) for parameter, unit in units.items()}
        self.gather_at_calls(module, blocks, gathers)

    def gather_at_calls(
        self, module: Module, blocks: List[Module], gathers: Mapping[Parameter, Callable[[], None]]
    ) -> None:
        """Calls a function for a parameter before each call of a module outside of blocks that holds it."""
        holders = _holders(module, blocks)
        for parameter, gather in gathers.items():
            for holder in holders[id(parameter)]:
                hook = _outside_graphs(gather)
                self._hooks.append(holder.register_forward_pre_hook(hook, prepend=True))

    @property
    def is_called(self) -> bool:
        """Whether a call of the model is under way, unless the model itself calls blocks."""
        return self._forwards > 0

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._units

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context of each call of the model, unless the model itself calls blocks."""
        self._forwards += 1
        self._have_blocks_run = False
        try:
            self._gather(self._first)
            yield
        finally:
            self._forwards -= 1
            for unit in self._of_blocks:
                self._whole.release(unit)
            self._of_blocks.clear()
            if not torch.is_grad_enabled():
                self.release()

    def begin_last(self, order: GatherOrder) -> None:
        """Called when the last unit of a pass has its parameters."""
        for unit in self._units:
            if unit in self._last:
                self._whole.begin(unit, at=order.at)
            elif unit not in order:
                # Blocks that are kept have not taken its place.
                self._whole.release(unit)

    def gather_last(self) -> None:
        """Called when blocks have run, before other code goes on."""
        self._have_blocks_run = True
        self._gather(self._last)

    def gather(self, unit: Unit) -> None:
        """Gathers a unit where it is read."""
        if not self._reach(unit):
            self._gather([unit])

    def gather_outside_blocks(self, unit: Unit) -> None:
        """Gathers a unit that code around the modules that call blocks reads."""
        if unit in self._units:
            # The next time, the unit shall be here before, or torch would compile this code again.
            units = self._last if self._have_blocks_run else self._first
            if unit not in units:
                units.append(unit)
        else:
            self._of_blocks.add(unit)
        self._gather([unit])

    def _gather(self, units):
        for unit in units:
            self._whole.begin(unit)
        for unit in units:
            unit.finish_gather()

    def release(self) -> None:
        for unit in self._units:
            self._whole.release(unit)

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _outside_graphs(function):
    """Returns a hook that calls ``function()``, but not in a compiled graph."""

    def hook(*_):
        if not torch.compiler.is_compiling():
            function()

    return Hook(hook)
