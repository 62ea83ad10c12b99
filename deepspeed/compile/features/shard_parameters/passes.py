# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The passes and the backward of one engine, in which blocks find their units whole (``compile.shard_parameters``)."""

import functools
import itertools
from typing import TYPE_CHECKING, Callable, Dict, List, Optional

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed.utils import logger

from ...zero_1_and_2.collectives import collective
from ..overlap_gather.arriving import is_traced
from .at_rest import refusal
from .comparison import PURPOSE, Comparison
from .gather_order import GatherOrder, tensors_in
from .private_torch import call_after_backward, in_backward, trace_again
from .saved_tensors import saving_handles
from .unit import Unit
from .whole_units import WholeUnits

if TYPE_CHECKING:
    from .outside import OutsideUnits

HIDDEN = (
    "rank {} ran no block that records a gradient in a call of {} whose output hides its tensors from torch; where "
    "other ranks ran such blocks in that call, they wait in its backward until this rank's backward ends, or to the "
    "time-out if it has none: return tensors, or lists and dicts of tensors, or run a block on every rank"
)


class Passes:
    """Gathers units around calls of blocks, and where a backward reads them.

    Args:
        units: id of a block -> its unit.
        all_units: these, and those of large parameters outside of blocks.
        beginning: what ranks compare when a backward of the engine begins, or None.

    Attributes:
        whole: which units are whole.
        around: gathers the units of large parameters outside of blocks.
        under_way: the passes of which one calls blocks that call others in turn.
    """

    around: "OutsideUnits"

    def __init__(self, units: Dict[int, Unit], all_units: List[Unit], beginning: Optional[Comparison]):
        self._unit_of, self._beginning = units, beginning
        self.whole = WholeUnits(all_units, self._must_stay)
        self.under_way: List[GatherOrder] = []
        # Passes of the last forward in which this rank recorded no gradient, and to which it sees no backward come.
        self._skipped: List[GatherOrder] = []
        # Whether ranks have compared that a backward of the engine begins.
        self._has_begun = False
        # The order of the backward that is under way.
        self._backward: Optional[GatherOrder] = None
        self._read_last: Optional[Unit] = None
        self._has_warned_of_hidden = False

    def _must_stay(self, gathered, unit):
        """Whether a unit outside of blocks must stay while another one is gathered."""
        if gathered not in self.around:
            return False
        # Compiled code goes on behind a block that it calls itself. It may have such a unit, or several.
        return unit in self.around or (bool(self.under_way) and self.under_way[0].is_of_block)

    # Forwards ------------------------------------------------------------------------------------------------------

    def around_module(self, call: Callable) -> Callable:
        """Returns the call of the model, around another call."""

        def run(*args, **kwargs):
            self._end_raised()
            # Code that is not compiled saves parameters themselves, whose memory goes.
            with self.around.forward(), saving_handles():
                return call(*args, **kwargs)

        return run

    def around_call(self, module: Module, blocks: Optional[List[Module]], call: Callable) -> Callable:
        """Returns the call of a block (``blocks`` is None) or of a module that calls blocks, around another call."""
        if blocks is None:
            unit = self._unit_of.get(id(module))
            return call if unit is None else functools.partial(self._call_block, unit, call)
        unit_of = {id(block): [self._unit_of[id(block)]] for block in blocks if id(block) in self._unit_of}
        unit_of.update(self.around.beside[id(module)])
        units = [unit for part in module.modules() for unit in unit_of.get(id(part), ())]
        order = units, self._units_without_gradient(module, blocks)
        return functools.partial(self._call_caller, order, call)

    def _call_caller(self, order, call, caller, /, *args, **kwargs):
        current = GatherOrder(self.whole, *order)
        output = self._call(current, None, functools.partial(call, caller), args, kwargs)
        if current.is_unseen and torch.is_grad_enabled() and not (in_backward() or self.whole.are_fixed):
            current.note_output(_any_requires_grad(args, kwargs))
            self._skipped.append(current)
            if not self._has_warned_of_hidden:
                self._has_warned_of_hidden = True
                # The other ranks have no reason to say it.
                logger.warning(HIDDEN.format(torch.distributed.get_rank(), type(caller).__name__))
        return output

    def _call_block(self, unit, call, block, /, *args, **kwargs):
        """Calls a block, with its parameters gathered."""
        call, current = functools.partial(call, block), self._order_with(unit)
        if current is not None:
            return self._within(current, unit, call, args, kwargs)
        # Someone calls the block by itself.
        return self._call(GatherOrder(self.whole, [unit], is_of_block=True), unit, call, args, kwargs)

    def _order_with(self, unit):
        """Returns the pass or the backward that is under way and has a place for a unit, or None."""
        # What runs in a backward is computed again, because it is checkpointed.
        for current in (*self.under_way[-1:], self._backward if in_backward() else None):
            if current is not None and unit in current:
                return current
        return None

    @property
    def is_forward(self) -> bool:
        """Whether a call of the model, or of a module that calls blocks, or of a block, is under way."""
        return bool(self.under_way) or self.around.is_called

    def reach(self, unit: Unit) -> bool:
        """Gathers a unit outside of blocks that has a place among those of blocks. Returns whether it has one now."""
        current = self._order_with(unit)
        if current is not None:
            self._reach(current, unit)
        return current is not None

    def _reach(self, current, unit):
        current.reach(unit)
        if self.under_way[:1] == [current] and current.units[-1] is unit:
            self.around.begin_last(current)

    def _call(self, schedule, unit, call, args, kwargs):
        self._end_raised()
        self.whole.warn_of_lent()
        if torch.is_grad_enabled() and not in_backward():
            schedule.keep(self.whole.most_kept, self.around)
        self.under_way.append(schedule)
        try:
            output = self._within(schedule, unit, call, args, kwargs)
        except torch.distributed.DistBackendError:
            self.under_way.remove(schedule)
            raise
        except BaseException:
            # Other ranks may be waiting for this rank's part.
            self._leave(schedule)
            raise
        self._leave(schedule)
        return output

    def _leave(self, schedule):
        """Ends a pass. Code behind the outermost one finds parameters outside of blocks."""
        self.under_way.remove(schedule)
        schedule.end()
        # Code that is compiled does not run again in a backward, but blocks that it has checkpointed do.
        if not self.under_way and not (schedule.is_of_block and in_backward()):
            self.around.gather_last()

    def _within(self, current, unit, call, args, kwargs):
        schedule = current.forward
        if unit is None:
            with saving_handles():
                output = call(*args, **kwargs)
            return self._call_when_reached(schedule, args, kwargs, output) if torch.is_grad_enabled() else output
        schedule.note_inputs((args, kwargs))
        with self.whole.in_use(unit):
            self._reach(current, unit)
            unit.is_used = True
            if in_backward():
                # What checkpointing computes again must save as its forward did, so not from a caller's memory.
                unit.memory.take_back()
            with saving_handles():
                return call(*args, **kwargs)

    def _call_when_reached(self, schedule, args, kwargs, output):
        """Has a backward gather in the order of this pass from its beginning, whether or not this rank ran blocks.

        Returns the output.
        """
        # An input that is handed on is an output of another module, which is reached through it.
        inputs = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None and id(tensor) not in inputs:
                schedule.note_gradient(None)
                tensor.register_hook(lambda _: self._backward_reaches(schedule))
        if not schedule.is_unseen:
            return output

        def needing_gradient(value):
            if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
                return value
            made = value + torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
            made.register_hook(lambda _: self._backward_reaches(schedule))
            schedule.note_output(_any_requires_grad(args, kwargs))
            return made

        # The outputs of ranks that have run blocks need gradients. So must this one's, or no backward comes here.
        return tree_map(needing_gradient, output)

    def pass_that_saves(self, unit: Unit) -> Optional[GatherOrder]:
        """Called when autograd saves a tensor of a unit. Returns the pass to which that belongs, if there is one."""
        backward = self._backward if in_backward() else None
        for current in (*self.under_way[::-1], backward):
            if current is not None and unit in current:
                current.forward.note_gradient(unit)
                return current.forward
        return None

    # Backwards -----------------------------------------------------------------------------------------------------

    def gather_for_backward(self, unit: Unit, schedule: Optional[GatherOrder] = None) -> None:
        """Called when a backward reads a unit. ``schedule``: the pass in which what it reads was saved."""
        if self.whole.are_fixed or (unit is self._read_last and unit.is_gathered):
            return
        if not in_backward():
            if unit.is_gathered:
                return
            raise refusal(unit.memory.name, "read")
        if schedule is None and unit in self.around:
            self.around.gather(unit)
            return
        if schedule is None:
            schedule = self._backward.forward if self._backward is not None and unit in self._backward else None
        self._backward_reaches(schedule or GatherOrder(self.whole, [unit]))
        self._backward.reach(unit)
        self._read_last = unit

    def begin_backward(self) -> None:
        """Called when a backward of the engine begins. Ranks that shard trained parameters compare that all begin one.

        Otherwise a rank that runs a backward and one that runs a forward might wait for each other until the time-out:
        a rank on a CPU waits for gradients, in another process group, before it gathers.
        """
        if self._beginning is None or self._has_begun or self.whole.are_fixed:
            return
        self._has_begun = True
        with collective(PURPOSE):
            self._beginning.start()
        self._beginning.wait()

    def _backward_reaches(self, schedule):
        """Called when a backward comes to a pass."""
        if self.whole.are_fixed:
            return
        if self._backward is None or self._backward.forward is not schedule:
            # Autograd goes through the last pass first, and comes to an earlier one when it is through.
            self.end_backward()
            self.join_skipped(schedule)
            self._backward = schedule.reversed()
            call_after_backward(lambda: self.end_backward(schedule))

    def gather_for_forward(self, unit: Unit) -> bool:
        """Called when code reads a unit at rest. Gathers it if that is in a forward, which all ranks run alike.

        Returns whether it is.
        """
        if not self.is_forward:
            return False
        if is_traced() and (self.under_way or unit not in self.around):
            # The next time, the unit shall be here before, or torch would compile this code again.
            self.whole.keep_whole(unit)
        if not self.under_way:
            self.around.gather_outside_blocks(unit)
        else:
            self.around.gather(unit)
        if is_traced():
            # Dynamo has met a parameter at rest, which is a subclass of tensors to it. It is none any more.
            raise trace_again("a sharded parameter was gathered")
        return True

    def finish_backward(self) -> None:
        """Called when a backward of the engine has run on this rank."""
        # On other ranks alone, the loss may have needed the engine.
        self.begin_backward()
        # Other ranks may wait for this rank's part of a block that this rank has skipped.
        self.end_backward()
        self.join_skipped()
        self.release_kept()
        self._has_begun = False

    def end_backward(self, schedule: Optional[GatherOrder] = None) -> None:
        """Ends the backward that is under way, or that has raised. ``schedule``: only if it goes through this pass."""
        if self._backward is not None and (schedule is None or schedule is self._backward.forward):
            backward, self._backward, self._read_last = self._backward, None, None
            backward.end()
            self.whole.free_lent()

    def _end_raised(self):
        """Ends the last backward of the engine if it raised, so that this rank has gathered what other ranks have."""
        if (self._backward is not None or self._has_begun) and not in_backward():
            self.end_backward()
            self.release_kept()
            self._has_begun = False

    def release_kept(self) -> None:
        """Called when a backward has run: releases what was gathered for the backward and was not read there."""
        self.whole.release_kept()
        self.around.release()

    def forget_skipped(self) -> None:
        """Called when a forward begins to which a backward may come."""
        self._skipped.clear()
        self._end_raised()

    def join_skipped(self, earlier: Optional[GatherOrder] = None) -> None:
        """Gathers what other ranks gather in a backward through passes to which this rank sees none come.

        Such a pass has returned tensors that nobody finds, so nothing says whether a backward comes to it on other
        ranks. They ran blocks there, and what blocks compute is taken to be used.

        Args:
            earlier: the pass to which the backward comes now, so that it is through later ones; None: it is over.
        """
        while self._skipped and (earlier is None or self._skipped[-1].number > earlier.number):
            self._skipped.pop().reversed().end()

    def _units_without_gradient(self, caller, called):
        """Counts the units of blocks before the first trained parameter of a module that calls blocks."""
        inside = {id(parameter) for block in called for parameter in block.parameters()}
        if any(parameter.requires_grad and id(parameter) not in inside for parameter in caller.parameters()):
            return 0
        frozen = itertools.takewhile(
            lambda block: not any(parameter.requires_grad for parameter in block.parameters()), called
        )
        return sum(id(block) in self._unit_of for block in frozen)


def _any_requires_grad(args, kwargs):
    return any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
