# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gathers updated parameters while the next forward begins (``compile.overlap_param_gather``)."""

import functools
import threading
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch.nn import Embedding, Module, Parameter

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger

from ...zero_1_and_2.collectives import collective
from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.gradient.native import users_of
from ...zero_1_and_2.gradient.registered import registered_parameters
from ...zero_1_and_2.layout import layouts_of
from ...zero_1_and_2.messages import log_notice
from ...zero_1_and_2.parameter.gather import PURPOSE, AllGather
from ..blocks.choose_blocks import parents_of
from ..blocks.feature import Blocks, chosen_blocks
from ..blocks.parameters import by_block, held_by_scripts, holders_outside
from .arriving import Arrival, Arriving, can_be_marked, mark, put_in_front, unmark
from .guards_of_callers import all_guards

if TYPE_CHECKING:
    from ...zero_1_and_2.graph.backend import Frame

# The number of the unit of parameters outside the blocks, or in several, for which a forward waits when it begins.
OUTSIDE = 0
ALIASED = (
    "steps wait for the gather of parameters, because a tensor shares their memory, such as a kept parameter.data; "
    "keep the parameters instead"
)


class OverlapGather(Feature, AllGather):
    """Sends units in the order in which a forward reads them (:func:`units_in_order`) while the next forward runs.

    A block waits for its own unit. Compiled code around blocks waits for the unit ``OUTSIDE`` when it begins. When a
    module that calls blocks has returned, compiled code waits for the units that it reads next. The guards of compiled
    code read the class of parameters, so these must arrive before. Any other code waits when it reads a parameter
    (``arriving.py``).
    """

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        if request.options.overlap_param_gather is not None:
            return request.options.overlap_param_gather
        # Sharded parameters are gathered by their own part.
        if request.options.sharded == "all":
            return False
        return bool(chosen_blocks(request)[0])

    def __init__(self, context: SetUpContext):
        AllGather.__init__(self, context.optimizer)
        blocks, module = context.get(Blocks), context.module
        units = units_in_order(registered_parameters(context.optimizer), module, blocks.blocks)
        # Weak, because a parameter that is being gathered refers to this object, and Dynamo's caches keep it.
        self._parameters = [[weakref.ref(parameter) for parameter in unit] for unit in units]
        # Units with parameters that some code reads without waiting. A step waits for them.
        unseen = held_by_scripts(module)
        self._not_overlapped = [
            index
            for index, unit in enumerate(units)
            if any(id(parameter) in unseen or not can_be_marked(parameter) for parameter in unit)
        ]
        self._unit_of = {id(parameter): index for index, unit in enumerate(units) for parameter in unit}
        # Unit -> parameter group -> runs of the flat tensor, ascending.
        self._runs: List[List[List[Tuple[int, int]]]] = [[[] for _ in context.layouts] for _ in units]
        for group, layout in enumerate(context.layouts):
            for place in layout.places:
                self._runs[self._unit_of[id(place.parameter)]][group].append(layout.run(place))
        # Number of a unit that is being gathered -> what is on its way, and the streams that have waited for that.
        self._works: Dict[int, Tuple[list, set]] = {}
        # Two threads of the caller may read one parameter.
        self._lock = threading.RLock()
        # The stream on which the units were sent, and the number of its device. None on a CPU.
        self._stream: Any = None
        self._device = context.optimizer.bit16_groups_flat[0].device.index
        # Whether the first unit of the current step has been sent.
        self._sent_first = False
        # How many tensors beside parameters each group's flat tensor had at the last look for aliases.
        self._others = [0] * len(context.layouts)
        # Whether somebody could read parameters of the current step without waiting, and whether the user knows.
        self._has_aliases = self._has_said_so = False
        context.undo.enter_context(all_guards())
        context.undo.callback(self._end)
        self._units_of_block = {id(block): self._units_of(block.parameters()) for block in blocks.blocks}
        # Id of a module that calls blocks -> units that the code around blocks reads when that module has returned.
        # None -> units that it reads before any of these has returned. Code that is compiled later adds units.
        self._read_behind: Dict[Optional[int], Set[int]] = defaultdict(set, {None: {OUTSIDE}})
        if len(units) > 1 + len(blocks.blocks):
            # C++ code that reads a head does not wait by itself.
            (caller,) = parents_of(module, blocks.blocks)
            self._read_behind[id(caller)].add(len(units) - 1)
        # Which of these modules has returned last in the forward that is under way.
        self._returned: Optional[int] = None
        blocks.wrap_calls(self._around_call)
        blocks.wrap_module(lambda call: functools.partial(self._call_module, call))

    @property
    def gather(self) -> Optional[AllGather]:  # type: ignore[override]
        # No attribute, because an object that holds itself is not freed with its engine.
        return self

    def _around_call(self, module: Module, blocks: Optional[List[Module]], call: Callable) -> Callable:
        if blocks is None:
            return functools.partial(self._call_block, self._units_of_block[id(module)], call)
        return functools.partial(self._call_caller, call)

    def _call_module(self, call, module, /, *args, **kwargs):
        self._go_on_behind(None)
        return call(module, *args, **kwargs)

    def _call_block(self, units, call, block, /, *args, **kwargs):
        self.wait(sorted(units))
        return call(block, *args, **kwargs)

    def _call_caller(self, call, caller, /, *args, **kwargs):
        # The caller runs uncompiled, so its own reads wait by themselves.
        output = call(caller, *args, **kwargs)
        self._go_on_behind(id(caller))
        return output

    def _go_on_behind(self, returned):
        """Waits for what compiled code reads behind the return of a module that calls blocks, or before any."""
        self._returned = returned
        self.wait(sorted(self._read_behind[returned]))

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        if frame.layer is None:
            # Wait for these units before this code runs again, so that guards find parameters in their own class.
            read = self._units_of(value for value in frame.inputs if isinstance(value, Parameter))
            self._read_behind[self._returned].update(read)
        return compiled()

    def _units_of(self, parameters):
        """Returns the numbers of the units that hold any of ``parameters``. Frozen parameters are in no unit."""
        return {self._unit_of[id(parameter)] for parameter in parameters if id(parameter) in self._unit_of}

    def before_step(self) -> None:
        # Units that no forward has read are on their way, and their collectives have views of the flat tensor.
        self.wait_all()
        before, self._has_aliases = self._has_aliases, self._aliases_exist()
        # Not at the first time: what the first step has compiled may keep memory until Python collects it.
        if before and self._has_aliases and not self._has_said_so:
            # Each rank says so itself: one may be the only one on which somebody keeps a tensor.
            log_notice(ALIASED, dist.get_rank())
            self._has_said_so = True

    def _aliases_exist(self):
        """Whether a tensor that neither the engine nor DeepSpeed has shares the memory of parameters, such as a
        ``parameter.data``.

        Such an alias has a class of its own, so reading it cannot wait. But it counts as a user of the memory. To be
        called where no step is under way, which has views of its own. Whoever keeps the outputs of a forward whose
        backward has not run keeps aliases, too.
        """
        optimizer = self._optimizer()
        for group, flat in enumerate(optimizer.bit16_groups_flat):
            # Look for parameters each time: the caller may have moved them elsewhere, and kept their memory.
            users = users_of(flat.untyped_storage()) - _count_in(flat, optimizer.bit16_groups[group])
            if users != self._others[group]:
                self._others[group] = _count_in(flat, _tensors_beside_parameters(optimizer, group))
                if users > self._others[group]:
                    return True
        return False

    def runs(self) -> List[List[List[Tuple[int, int]]]]:
        return self._runs

    def first_spans(self, group: int) -> List[Tuple[int, int]]:
        # A forward needs the first unit before it begins.
        world = layouts_of(self._optimizer())[group].world
        spans: List[Tuple[int, int]] = []
        for first, numel in self._runs[0][group]:
            begin = spans.pop()[0] if spans and spans[-1][1] == first // world else first // world
            spans.append((begin, (first + numel) // world))
        return spans

    def start_first(self) -> None:
        self.wait_all()
        with collective(PURPOSE):
            self._send(0)
        self._sent_first = True

    def start(self) -> None:
        """Returns while parameters are being sent."""
        if not self._sent_first:
            self.start_first()
        self._sent_first = False
        with collective(PURPOSE):
            for index in range(1, len(self._runs)):
                self._send(index)
        self.wait(sorted(self._works) if self._has_aliases else self._not_overlapped)

    def _send(self, unit):
        """Begins to send a unit, and makes readers of its parameters wait."""
        works = [work for group, runs in enumerate(self._runs[unit]) if runs for work in self.begin(group, runs)]
        if not works:
            return
        self._works[unit], self._stream = (works, set()), get_accelerator().current_stream()
        if unit not in self._not_overlapped:
            mark(self._living(unit), Arrival(self, unit))

    def _living(self, unit):
        return [parameter for reference in self._parameters[unit] if (parameter := reference()) is not None]

    def wait(self, units: Iterable[int]) -> None:
        """Makes the current stream, and on a CPU the calling thread, wait for these units.

        Then the parameters have their own class again, so the stream on which the units were sent must wait too: it
        may read the parameters next.
        """
        if self._works:
            with self._lock:
                for index in units:
                    self.receive(index)
                    self._give_back(index)

    def receive(self, unit: int) -> None:
        with self._lock:
            # Name the device: in a thread of the caller's, another one may be current.
            stream = get_accelerator().current_stream(self._device)
            works, waited = self._works.get(unit, ((), set()))
            if stream in waited:
                return
            streams = {stream, self._stream}
            # Keep the works until the parameters have their class again: another stream of the caller's may read them
            # next, and must wait too. If a wait raised, every later one must raise, because nobody may use them.
            for work in works:
                for waiting in streams:
                    with collective(PURPOSE), get_accelerator().stream(waiting):
                        work.wait()
            waited.update(streams)

    def receive_all(self) -> None:
        if self._works:
            with self._lock:
                for unit in sorted(self._works):
                    self.receive(unit)

    def arrive(self, unit: int) -> None:
        with self._lock:
            self.receive(unit)
            # On a GPU, another stream may read the parameters next, and must wait until they are there. The forward
            # gives the class back earlier, because guards of compiled blocks read it.
            works, _ = self._works.get(unit, ((), set()))
            if self._stream is None or all(map(_is_over, works)):
                self._give_back(unit)

    def mark_again(self, parameter: torch.Tensor, arrival: Arrival) -> None:
        with self._lock:
            if arrival.unit in self._works:
                put_in_front(parameter, Arriving, _arrival=arrival)

    def _give_back(self, unit):
        if self._works.pop(unit, None) is not None and unit not in self._not_overlapped:
            unmark(self._living(unit))

    def wait_all(self) -> None:
        """Waits for every unit that is being gathered."""
        # A step that was interrupted may have sent its first unit.
        self._sent_first = False
        if self._works:
            self.wait(sorted(self._works))

    def _end(self):
        """Restores the class of all parameters, even if some cannot be received."""
        try:
            self.wait_all()
        except RuntimeError as error:
            logger.warning(f"The engine is destroyed, but parameters of the last step did not arrive: {error}")
        finally:
            for unit in list(self._works):
                self._give_back(unit)


def units_in_order(parameters: Sequence[Parameter], module: Module, blocks: List[Module]) -> List[List[Parameter]]:
    """Splits ``parameters`` into units in the order in which a forward reads them, as far as modules show it.

    The first unit is ``OUTSIDE``, which may be empty. Each block has a unit. If one module calls all blocks, what is
    held only by modules that are registered behind it, such as a head, is the last unit. Embeddings are not: they are
    read first. If several modules call blocks, what is registered behind all may be read between them.
    """
    outside, *of_blocks = by_block(parameters, module, blocks)
    callers = parents_of(module, blocks)
    if len(callers) != 1:
        return [outside, *of_blocks]
    place, holders = {part: number for number, part in enumerate(module.modules())}, holders_outside(module, blocks)
    end = max(place[part] for part in callers[0].modules())
    of_several = {id(parameter) for block in blocks for parameter in block.parameters()}

    def is_read_last(parameter):
        held_by = holders[id(parameter)]
        follows = all(place[holder] > end and not isinstance(holder, Embedding) for holder in held_by)
        return bool(held_by) and follows and id(parameter) not in of_several

    last = {id(parameter) for parameter in outside if is_read_last(parameter)}
    units = [[parameter for parameter in outside if id(parameter) not in last], *of_blocks]
    return [*units, [parameter for parameter in outside if id(parameter) in last]] if last else units


def _is_over(work):
    """Whether a device has done what :meth:`AllGather.begin` has begun. Some of it is an event."""
    return work.query() if hasattr(work, "query") else work.is_completed()


def _tensors_beside_parameters(optimizer: DeepSpeedZeroOptimizer, group: int) -> List[torch.Tensor]:
    """Lists the tensors beside parameters that DeepSpeed has in a group's flat tensor, and that tensor."""
    links = (getattr(parameter, "_hp_mapping", None) for parameter in optimizer.bit16_groups[group])
    tensors = [
        optimizer.bit16_groups_flat[group],
        *(link.lp_fragment for link in links if link is not None),
    ]
    # A view keeps the tensor of which it is one.
    tensors += [tensor._base for tensor in tensors if tensor._base is not None]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _count_in(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> int:
    """Counts the tensors that share a flat tensor's memory."""
    first = flat.data_ptr()
    behind = first + flat.numel() * flat.element_size()
    storage = flat.untyped_storage()._cdata
    # A parameter that is still being gathered need not arrive to say where it lies.
    with torch._C.DisableTorchFunctionSubclass():
        # A tensor without elements has no address.
        return sum(
            first <= tensor.data_ptr() < behind or (not tensor.numel() and tensor.untyped_storage()._cdata == storage)
            for tensor in tensors
        )


FEATURE = OverlapGather
