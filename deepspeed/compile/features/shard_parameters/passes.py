# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The passes and the backward of one engine, in which code finds units whole (``compile.shard_parameters``).

A unit of a block is gathered around the block's calls. Code around blocks reads large parameters outside of blocks
(``outside.py``), and most of that code is compiled. Dynamo must not meet a parameter at rest, so these units are
gathered before such code runs, and not where it reads them:

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
import itertools
from collections import defaultdict
from typing import Callable, Dict, List, Mapping, Optional, Set

import torch
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ...zero_1_and_2.gradient.backward import in_backward
from ...zero_1_and_2.hooks import Hook
from ..blocks.parameters import holders_outside
from ..overlap_gather.arriving import is_traced
from .at_rest import NOT_HERE
from .comparison import BEGINNING, END, Comparison
from .gather_order import GatherOrder
from .outside import beside_blocks, read_times
from .saved_tensors import saving_handles
from .unit import Unit
from .whole_units import WholeUnits


class Passes:
    """Gathers units around calls of blocks, for code around blocks, and where a backward reads them.

    Args:
        module, blocks: the model, and its blocks.
        units: id of a block -> its unit.
        large: a large parameter outside of blocks -> its unit.
        moments: what ranks compare when a pass ends, and when a backward of the engine begins or ends.

    Attributes:
        whole: which units are whole.
        under_way: the passes under way, the outermost first. There are several if a block calls other blocks.
    """

    def __init__(
        self,
        module: Module,
        blocks: List[Module],
        units: Dict[int, Unit],
        large: Dict[Parameter, Unit],
        moments: Comparison,
    ):
        self._unit_of, self._large, self._moments = units, list(large.values()), moments
        self.whole = WholeUnits([*units.values(), *self._large], self._must_stay)
        self.under_way: List[GatherOrder] = []
        # Whether ranks have compared that a backward of the engine begins.
        self._has_begun = False
        # The order of the backward that is under way.
        self._backward: Optional[GatherOrder] = None
        self._read_last: Optional[Unit] = None
        # Id of a module that calls blocks -> id of a layer beside these -> the layer's units.
        self._beside: Dict[int, Dict[int, List[Unit]]] = defaultdict(lambda: defaultdict(list))
        for caller, layer, parameter in beside_blocks(large, module, blocks):
            self._beside[id(caller)][id(layer)].append(large[parameter])
        # The units to gather when a forward begins, and those to gather when the modules that call blocks have run.
        self._first, self._last = ([large[weight] for weight in read] for read in read_times(large, module, blocks))
        # How many calls of the model are under way, unless the model itself calls blocks, and whether blocks have run
        # in the last one.
        self._forwards = 0
        self._have_blocks_run = False
        # Units of blocks that code around the modules that call blocks has read in the forward that is under way.
        self._of_blocks: Set[Unit] = set()
        self._hooks: List[RemovableHandle] = []
        gathers = {parameter: functools.partial(self._gather_where_read, unit) for parameter, unit in large.items()}
        self.gather_at_calls(module, blocks, gathers)

    def gather_at_calls(
        self, module: Module, blocks: List[Module], gathers: Mapping[Parameter, Callable[[], None]]
    ) -> None:
        """Calls a function for a parameter before each call of a module outside of blocks that holds it."""
        holders = holders_outside(module, blocks)
        for parameter, gather in gathers.items():
            for holder in holders[id(parameter)]:
                hook = _outside_graphs(gather)
                self._hooks.append(holder.register_forward_pre_hook(hook, prepend=True))

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _must_stay(self, gathered, unit):
        """Whether a unit outside of blocks must stay while another one is gathered."""
        if gathered not in self._large:
            return False
        # Compiled code goes on behind a block that it calls itself. It may have such a unit, or several.
        return unit in self._large or (bool(self.under_way) and self.under_way[0].is_of_block)

    # Forwards ------------------------------------------------------------------------------------------------------

    def around_module(self, call: Callable) -> Callable:
        """Returns the call of the model, around another call."""

        def run(*args, **kwargs):
            self._end_raised()
            self._refuse_other_tensors()
            # Code that is not compiled saves parameters themselves, whose memory goes.
            with self._in_forward(), saving_handles():
                return call(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _in_forward(self):
        self._forwards += 1
        self._have_blocks_run = False
        try:
            self._gather(self._first)
            yield
        finally:
            self._forwards -= 1
            for unit in self._of_blocks:
                self.whole.release(unit)
            self._of_blocks.clear()
            if not torch.is_grad_enabled():
                self._release_large()

    def around_call(self, module: Module, blocks: Optional[List[Module]], call: Callable) -> Callable:
        """Returns the call of a block (``blocks`` is None) or of a module that calls blocks, around another call."""
        if blocks is None:
            unit = self._unit_of.get(id(module))
            return call if unit is None else functools.partial(self._call_block, unit, call)
        unit_of = {id(block): [self._unit_of[id(block)]] for block in blocks if id(block) in self._unit_of}
        unit_of.update(self._beside[id(module)])
        units = [unit for part in module.modules() for unit in unit_of.get(id(part), ())]
        order = units, self._units_without_gradient(module, blocks)
        return functools.partial(self._call_caller, order, call)

    def _call_caller(self, order, call, caller, /, *args, **kwargs):
        schedule = GatherOrder(self.whole, *order)
        with self._in_pass(schedule):
            with saving_handles():
                output = call(caller, *args, **kwargs)
            if torch.is_grad_enabled():
                self._call_when_reached(schedule, args, kwargs, output)
            if schedule.units:
                # A rank that has left out the last blocks would go on, and others would wait for it.
                self._compare(schedule.at)
        return output

    def _call_block(self, unit, call, block, /, *args, **kwargs):
        """Calls a block, with its parameters gathered."""
        if unit.memory.asked and torch.is_grad_enabled():
            unit.memory.refuse_to_train()
        current = self._active_pass_for(unit)
        with contextlib.ExitStack() as stack:
            if current is None:
                # Someone calls the block by itself.
                current = stack.enter_context(self._in_pass(GatherOrder(self.whole, [unit], is_of_block=True)))
            stack.enter_context(self.whole.in_use(unit))
            self._reach(current, unit)
            unit.is_used = True
            if in_backward():
                # What checkpointing computes again must save as its forward did, so not from a caller's memory.
                unit.memory.take_back()
            with saving_handles():
                return call(block, *args, **kwargs)

    def _active_pass_for(self, unit):
        """Returns the pass or the backward that is under way and has a place for a unit, or None."""
        # What runs in a backward is computed again, because it is checkpointed.
        for current in (*self.under_way[-1:], self._backward if in_backward() else None):
            if current is not None and unit in current:
                return current
        return None

    def _reach(self, current, unit):
        current.reach(unit)
        if self.under_way[:1] != [current] or current.units[-1] is not unit:
            return
        for large in self._large:
            if large in self._last:
                self.whole.begin(large, at=current.at)
            elif large not in current:
                # Blocks that are kept have not taken its place.
                self.whole.release(large)

    def _gather_where_read(self, unit):
        current = self._active_pass_for(unit)
        if current is not None:
            self._reach(current, unit)
        else:
            self._gather([unit])

    def _gather(self, units):
        for unit in units:
            self.whole.begin(unit)
        for unit in units:
            unit.finish_gather()

    def _release_large(self):
        for unit in self._large:
            self.whole.release(unit)

    @contextlib.contextmanager
    def _in_pass(self, schedule):
        """Context of a pass."""
        self._end_raised()
        self._refuse_other_tensors()
        self.whole.warn_of_external_views()
        if torch.is_grad_enabled() and not in_backward():
            schedule.keep(self.whole.most_kept, self._large)
        self.under_way.append(schedule)
        try:
            yield schedule
        except torch.distributed.DistBackendError:
            self.under_way.remove(schedule)
            raise
        except BaseException:
            self._leave(schedule)
            raise
        self._leave(schedule)

    def _refuse_other_tensors(self):
        """Raises RuntimeError if the caller makes torch create tensors into which parameters cannot be gathered."""
        if not self.whole.are_fixed and _makes_other_tensors():
            raise RuntimeError(
                "compile.shard_parameters cannot gather parameters within FakeTensorMode or a transform of torch.func "
                "that differentiates; leave it out, or call the engine outside of these"
            )

    def _leave(self, schedule):
        """Ends a pass. Code behind the outermost one finds parameters outside of blocks."""
        self.under_way.remove(schedule)
        schedule.end()
        # Code that is compiled does not run again in a backward, but blocks that it has checkpointed do.
        if not self.under_way and not (schedule.is_of_block and in_backward()):
            self._have_blocks_run = True
            self._gather(self._last)

    def _compare(self, at):
        """Ranks compare where they are, unless units are fixed and a rank may run alone."""
        if not self.whole.are_fixed:
            self._moments.start(at)
            self._moments.wait()

    def _call_when_reached(self, schedule, args, kwargs, output):
        """Makes a backward gather in the order of this pass from its beginning, before it reads saved tensors."""
        # An input that is handed on is an output of another module, which is reached through it.
        inputs = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None and id(tensor) not in inputs:
                tensor.register_hook(lambda _: self._pre_backward(schedule))

    def pass_that_saves(self, unit: Unit) -> Optional[GatherOrder]:
        """Called when autograd saves a tensor of a unit. Returns the pass that saves the tensor, if there is one."""
        backward = self._backward if in_backward() else None
        for current in (*self.under_way[::-1], backward):
            if current is not None and unit in current:
                current.forward.note_gradient(unit)
                return current.forward
        return None

    # Backwards -----------------------------------------------------------------------------------------------------

    def gather_for_backward(self, unit: Unit, schedule: Optional[GatherOrder] = None) -> None:
        """Called when a backward reads a unit. ``schedule``: the pass that saved what the backward reads."""
        if self.whole.are_fixed or (unit is self._read_last and unit.is_gathered):
            return
        if not in_backward():
            if unit.is_gathered:
                return
            raise RuntimeError(NOT_HERE.format(unit.memory.name, "read"))
        if schedule is None and unit in self._large:
            self._gather_where_read(unit)
            return
        if schedule is None:
            schedule = self._backward.forward if self._backward is not None and unit in self._backward else None
        self._pre_backward(schedule or GatherOrder(self.whole, [unit]))
        self._backward.reach(unit)
        self._read_last = unit

    def begin_backward(self) -> None:
        """Called when a backward of the engine begins. Ranks compare that all begin one.

        Otherwise a rank that runs a backward and one that runs a forward might wait for each other until the time-out:
        a rank waits for gradients, in another process group, at the end of its backward.
        """
        if not self._has_begun:
            self._has_begun = True
            self._compare(BEGINNING)

    def _pre_backward(self, schedule):
        """Called when a backward comes to a pass."""
        if self.whole.are_fixed:
            return
        if self._backward is None or self._backward.forward is not schedule:
            # Autograd goes through the last pass first, and comes to an earlier one when it is through.
            self.end_backward()
            self._backward = schedule.reversed()
            # No hook of a tensor tells which gradient is the last one. Torch's FSDP queues such a callback too.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end_backward(schedule))

    def gather_for_forward(self, unit: Unit) -> bool:
        """Called when code reads a unit at rest. Gathers it if that is in a forward, which all ranks run alike.

        Returns whether it is.
        """
        if not (self.under_way or self._forwards):
            return False
        if is_traced() and (self.under_way or unit not in self._large):
            # The next time, the unit shall be here before, or torch would compile this code again.
            self.whole.keep_whole(unit)
        if self.under_way:
            self._gather_where_read(unit)
        else:
            if unit not in self._large:
                self._of_blocks.add(unit)
            else:
                # The next time, the unit shall be here before, or torch would compile this code again.
                units = self._last if self._have_blocks_run else self._first
                if unit not in units:
                    units.append(unit)
            self._gather([unit])
        if is_traced():
            # Dynamo has met a parameter at rest, which is a subclass of tensors to it. It is none any more.
            # Any other error ends the program, or makes Dynamo leave the frame alone.
            raise torch._dynamo.exc.UnspecializeRestartAnalysis(restart_reason="a sharded parameter was gathered")
        return True

    def finish_backward(self) -> None:
        """Called when a backward of the engine has run on this rank."""
        # On other ranks alone, the loss may have needed the engine.
        self.begin_backward()
        self._end_backward_of_engine()
        # Other ranks may wait for this rank's part of blocks that this backward has not come to.
        self._compare(END)

    def end_backward(self, schedule: Optional[GatherOrder] = None) -> None:
        """Ends the backward that is under way, or that has raised. ``schedule``: only if it goes through this pass."""
        if self._backward is not None and (schedule is None or schedule is self._backward.forward):
            backward, self._backward, self._read_last = self._backward, None, None
            backward.end()
            self.whole.free_unviewed()

    def _end_raised(self):
        """Ends the last backward of the engine if it raised."""
        if (self._backward is not None or self._has_begun) and not in_backward():
            self._end_backward_of_engine()

    def _end_backward_of_engine(self):
        """Ends a backward of the engine. Releases what was gathered for the backward and was not read there."""
        self.end_backward()
        self.whole.release_kept()
        self._release_large()
        self._has_begun = False

    def _units_without_gradient(self, caller, called):
        """Counts the units of blocks before the first trained parameter of a module that calls blocks."""
        inside = {id(parameter) for block in called for parameter in block.parameters()}
        if any(parameter.requires_grad and id(parameter) not in inside for parameter in caller.parameters()):
            return 0
        frozen = itertools.takewhile(
            lambda block: not any(parameter.requires_grad for parameter in block.parameters()), called
        )
        return sum(id(block) in self._unit_of for block in frozen)


def _makes_other_tensors():
    """Whether new tensors are of another class than torch's own, or have no memory."""
    made = torch.empty(0)
    try:
        made.untyped_storage()
    except NotImplementedError:
        return True
    return type(made) is not torch.Tensor


def _tensors_in(values):
    """Yields tensors, also those of objects that torch does not know."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in tree_leaves(vars(leaf)) if isinstance(value, torch.Tensor))


def _outside_graphs(function):
    """Returns a hook that calls ``function()``, but not in a compiled graph."""

    def hook(*_):
        if not torch.compiler.is_compiling():
            function()

    return Hook(hook)
