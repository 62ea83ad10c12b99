# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Puts memory into categories, from the events of torch's profiler.

Every allocation counts, on CPU and GPU alike, and belongs to one category at a time:

- Memory from before the step has the category of the engine's tensors in it.
- Memory that the forward allocates and that still exists in the next backward is an activation.
- A gradient counts from the time when autograd hands it to the code that reduces or accumulates it until its memory is
  freed. Memory that reduction and accumulation allocate also counts as gradients. This fork's reducer marks a gradient
  as waiting, on its way or bound. In other systems, memory into which the backward copies a gradient is a gradient
  from its allocation on. There, a gradient that exists in the step is a target, one that outlives another backward
  waits, and all others are on their way.
- A copy of gradients that the step makes, for example in fp32, is a gradient copy.
- The rest are temporary results, batches, and memory that no rule above covers.
"""

import bisect
import dataclasses
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from .data import ACTIVATIONS, CATEGORIES, COPIES, ON_THEIR_WAY, PARAMETERS, PHASES, REST, TARGETS, WAITING, StepMemory

# Ranges without length, which mark where a phase begins or ends: MARK + phase + BEGIN or END.
MARK, BEGIN, END = "memory_picture.", " begins", " ends"
# The prefix of the names of nodes that autograd runs.
AUTOGRAD = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
# Operators whose first operand is a gradient or a list of gradients.
TAKES_GRADIENT = {"deepcompile::reduce_grad", "dc::reduce_grad", "fsdp::chunk_cat", ACCUMULATE}
# Events in which memory is allocated for gradients. Ranges that begin with FSDP_BACKWARD count too.
HOLDS_GRADIENT = {
    "deepcompile::reduce_grad",
    "deepcompile::end_backward",
    "deepcompile::finish_backward",
    "deepcompile::gradient_range",
    "dc::reduce_grad",
    "dc::end_backward",
    AUTOGRAD + ACCUMULATE,
}
FSDP_BACKWARD = ("FSDP::post_backward", "FSDP::root_post_backward")
# The prefix of ranges in which memory is allocated for parameters.
FSDP_GATHER = "FSDP::all_gather"
# Operators that allocate a copy of a gradient, if their first operand is one.
COPIES_GRADIENT = {"aten::_to_copy", "aten::clone"}
# Copies its second operand into its first.
COPIES_INTO = "aten::copy_"
# The marks of csrc/compile/memory.cpp: from such a mark on, the memory of its operand is in this category. None: the
# reducer has dropped the memory. It does not mark dropped targets.
STAGES: Dict[str, Optional[str]] = {
    "deepcompile::waiting": WAITING,
    "deepcompile::on_its_way": ON_THEIR_WAY,
    "deepcompile::bound": TARGETS,
    "deepcompile::dropped": None,
}
# Events of a step with which the gather begins: this fork's range, and the collectives of other systems.
GATHER = "deepcompile::gather"
COLLECTIVE_GATHERS = {"c10d::_allgather_base_", "c10d::allgather_", "c10d::allgather_into_tensor_coalesced_"}


@dataclasses.dataclass
class _Allocation:
    """Memory that was allocated at one time and freed at another."""

    size: int  # bytes
    began: int  # index of the event that allocated it, -1 before the recording
    courses: List[Tuple[int, str]]  # (index of an event, category from then on), in order
    ended: Optional[int] = None  # index of the event that freed it, or None

    @property
    def stands(self) -> bool:
        """Whether the memory is from before the recording. It keeps its category, whatever is written there."""
        return self.began < 0

    def is_held(self, index: int) -> bool:
        return self.began <= index and (self.ended is None or index < self.ended)

    def put(self, index: int, category: str) -> None:
        if self.courses[-1][1] != category:
            self.courses.append((index, category))


class _Allocations:
    """All allocations of a recording, and the current ones by their address."""

    def __init__(self, standing: Dict[int, Tuple[int, str]]):
        self.at = {address: _Allocation(size, -1, [(-1, category)]) for address, (size, category) in standing.items()}
        self.all = list(self.at.values())

    def change(self, index: int, address: int, size: int, category: str) -> None:
        """Notes an allocation, or a release (``size`` below 0)."""
        # The profiler does not see frees of threads without a profiler, such as gloo's. So an older allocation at this
        # address was freed unseen.
        self.free(index, address)
        if size > 0:
            self.at[address] = allocation = _Allocation(size, index, [(index, category)])
            self.all.append(allocation)

    def free(self, index: int, address: int) -> None:
        allocation = self.at.pop(address, None)
        if allocation is not None:
            allocation.ended = index

    def free_gradients(self, index: int) -> None:
        """Frees all remaining gradients when a step has ended: a thread of gloo may have freed them unseen."""
        for address in list(self.at):
            if not self.at[address].stands and self.category(address) in (TARGETS, ON_THEIR_WAY):
                self.free(index, address)

    def put(self, index: int, address: int, category: str) -> None:
        """Puts the allocation at ``address``, if there is one, into a category."""
        allocation = self.at.get(address)
        if allocation is not None and not allocation.stands:
            allocation.put(index, category)

    def holds_gradient(self, address: int) -> bool:
        return self.category(address) in (TARGETS, ON_THEIR_WAY, WAITING)

    def take_for_gradients(self, address: int) -> None:
        """Makes the allocation at ``address`` a gradient on its way since its beginning, unless it has a category."""
        allocation = self.at.get(address)
        if allocation is not None and allocation.courses == [(allocation.began, REST)] and not allocation.stands:
            allocation.courses = [(allocation.began, ON_THEIR_WAY)]

    def category(self, address: int) -> Optional[str]:
        allocation = self.at.get(address)
        return allocation.courses[-1][1] if allocation is not None else None


@dataclasses.dataclass
class _Entry:
    """An event of the profiler, with properties that follow from the events around it."""

    event: Any
    holds: Optional[str]  # the category of memory that is allocated in it, or None
    in_autograd: bool  # whether autograd ran it


def _flatten(roots: List[Any]) -> Iterator[_Entry]:
    """Yields every event of the tree, parents before children."""
    stack = [_Entry(root, None, False) for root in reversed(roots)]
    while stack:
        entry = stack.pop()
        yield entry
        name, holds = entry.event.name, entry.holds
        if name in HOLDS_GRADIENT or name.startswith(FSDP_BACKWARD):
            holds = ON_THEIR_WAY
        elif name.startswith(FSDP_GATHER):
            holds = PARAMETERS
        in_autograd = entry.in_autograd or name.startswith(AUTOGRAD)
        stack.extend(_Entry(child, holds, in_autograd) for child in reversed(entry.event.children))


@dataclasses.dataclass
class _Phases:
    """Where phases begin and end, as indices of events and as seconds."""

    indices: Dict[str, List[Tuple[int, int]]]
    seconds: Dict[str, List[Tuple[float, float]]]

    def within(self, name: str, index: int) -> bool:
        return any(begin <= index <= end for begin, end in self.indices[name])


def _find_phases(entries: List[_Entry], seconds: List[float]) -> _Phases:
    indices: Dict[str, List[Tuple[int, int]]] = {name: [] for name in PHASES}
    began: Dict[str, int] = {}
    gathers: List[int] = []

    def end(phase, index):
        if phase in began:
            indices[phase].append((began.pop(phase), index))

    for index, entry in enumerate(entries):
        name = entry.event.name
        if name.startswith(MARK) and name.endswith(BEGIN):
            # A backward of several losses begins several times.
            began.setdefault(name[len(MARK) : -len(BEGIN)], index)
        elif name.startswith(MARK):
            phase = name[len(MARK) : -len(END)]
            if phase == "backward" and phase not in began and indices["forward"]:
                # No gradient has announced this backward.
                began[phase] = indices["forward"][-1][1]
            end(phase, index)
        elif "step" in began and (name == GATHER or name in COLLECTIVE_GATHERS):
            gathers.append(index)
    for phase in tuple(began):
        # The step raised in this phase.
        end(phase, len(entries) - 1)
    named = [index for index in gathers if entries[index].event.name == GATHER] or gathers
    for begin, last in indices["step"]:
        within = [index for index in named if begin <= index <= last]
        # The host does not wait for the collectives, so the gather lasts until the step's end, which waits.
        indices["gather"] += [(within[0], last)] if within else []
    times = {name: [(seconds[first], seconds[last]) for first, last in spans] for name, spans in indices.items()}
    return _Phases(indices, times)


def _operands(event: Any, place: int = 0) -> Iterator[int]:
    """Yields the addresses of an operator's operand, by default the first one, a tensor or a list of tensors."""
    inputs = getattr(event.extra_fields, "inputs", None) or ()
    taken = inputs[place] if place < len(inputs) else ()
    for tensor in taken if isinstance(taken, (list, tuple)) else [taken]:
        address = getattr(tensor, "storage_data_ptr", None)
        if address is not None:
            yield address


def read_events(
    roots: List[Any], device: str, standing: Dict[int, Tuple[int, str]], final: Dict[int, str], uncounted: int = 0
) -> StepMemory:
    """Returns the memory of the step that a profiler has recorded.

    Args:
        device: the device of the memory, "cpu" or "cuda".
        standing: address -> (bytes, category) of memory from before the recording.
        final: address -> category of memory of known tensors at the end of the recording.
        uncounted: bytes on a GPU that torch's allocator does not count. Some of ``standing`` may be among them.
    """
    entries = sorted(_flatten(roots), key=lambda entry: entry.event.start_time_ns)
    marks = [entry.event.start_time_ns for entry in entries if entry.event.name.startswith(MARK)]
    origin = marks[0] if marks else entries[0].event.start_time_ns
    seconds = [max(0.0, (entry.event.start_time_ns - origin) / 1e9) for entry in entries]
    phases = _find_phases(entries, seconds)
    allocations = _Allocations(standing)
    staged = any(entry.event.name in STAGES for entry in entries)
    totals = _follow(entries, phases, allocations, device, staged)
    begins = {name: [begin for begin, _ in phases.indices[name]] for name in ("forward", "backward")}
    for allocation in allocations.all:
        _look_back(allocation, phases, begins, len(entries), staged)
    for address, category in final.items():
        if address in allocations.at:
            allocations.at[address].courses = [(allocations.at[address].began, category)]
    if staged and device == "cpu" and phases.indices["step"]:
        allocations.free_gradients(len(entries) - 1)
    totals = {index: total + uncounted for index, total in totals.items()}
    return _lay_out(allocations, seconds, totals, phases)


def _follow(entries, phases, allocations, device, staged):
    """Applies events to ``allocations``; returns {index of an event: bytes allocated by a GPU's allocator}."""
    totals: Dict[int, int] = {}
    copying_until: Dict[int, int] = {}  # thread -> nanoseconds at which it ends its last copy of a gradient
    for index, entry in enumerate(entries):
        event = entry.event
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type != device:
                continue
            # In the backward phase, the engine allocates memory outside of autograd, for gradients.
            around = not entry.in_autograd and phases.within("backward", index)
            copied = event.start_time_ns <= copying_until.get(event.start_tid, 0)
            category = entry.holds or (ON_THEIR_WAY if around or copied else REST)
            if category == ON_THEIR_WAY and phases.within("step", index):
                category = COPIES
            allocations.change(index, fields.ptr, fields.alloc_size, category)
            if device != "cpu":
                if not totals:
                    totals[-1] = fields.total_allocated - fields.alloc_size
                totals[index] = fields.total_allocated
        elif event.name in STAGES:
            category = STAGES[event.name]
            for address in _operands(event):
                if category is not None:
                    allocations.put(index, address, category)
                elif allocations.category(address) == ON_THEIR_WAY:
                    allocations.free(index, address)
        elif event.name in TAKES_GRADIENT:
            for address in _operands(event):
                if allocations.category(address) in (REST, PARAMETERS):
                    allocations.put(index, address, ON_THEIR_WAY)
        elif event.name in COPIES_GRADIENT:
            if any(map(allocations.holds_gradient, _operands(event))):
                copying_until[event.start_tid] = event.end_time_ns
        elif event.name == COPIES_INTO and not staged and phases.within("backward", index):
            # DeepSpeed 0.19.8 with DeepCompile fills its partition like this, after a hook of autograd allocated it.
            if any(map(allocations.holds_gradient, _operands(event, place=1))):
                for address in _operands(event):
                    allocations.take_for_gradients(address)
    return totals


def _look_back(allocation, phases, begins, last, staged):
    """Corrects the categories of an allocation by its later life."""
    first = allocation.courses[0]
    if first[1] == REST and not allocation.stands:
        # Find the last forward that had begun, and the backward that follows it.
        before = bisect.bisect_right(begins["forward"], allocation.began) - 1
        if before >= 0:
            following = bisect.bisect_left(begins["backward"], begins["forward"][before])
            # A step that raised may have no backward.
            backward = begins["backward"][following] if following < len(begins["backward"]) else last
            if allocation.began < backward and allocation.is_held(backward - 1):
                allocation.courses[0] = (first[0], ACTIVATIONS)
    if staged or allocation.stands:
        return
    ends = [end for _, end in phases.indices["backward"]]
    for number, (index, category) in enumerate(allocation.courses):
        if category == ON_THEIR_WAY and ends:
            if allocation.is_held(ends[-1]) and index <= ends[-1]:
                allocation.courses[number] = (index, TARGETS)
            elif any(index <= end and allocation.is_held(end) for end in ends[:-1]):
                allocation.courses[number] = (index, WAITING)


def _lay_out(allocations, seconds, totals, phases):
    """Adds the allocations up."""
    changes: Dict[int, List[Tuple[str, int]]] = {}
    now = dict.fromkeys(CATEGORIES, 0)
    for allocation in allocations.all:
        before = ""
        for index, category in allocation.courses:
            if before:
                changes.setdefault(index, []).append((before, -allocation.size))
            changes.setdefault(index, []).append((category, allocation.size))
            before = category
        if allocation.ended is not None:
            changes.setdefault(allocation.ended, []).append((before, -allocation.size))
    held: Dict[str, List[int]] = {name: [] for name in CATEGORIES}
    moments: List[float] = []
    total = totals.get(-1)
    # The total of a GPU's allocator includes allocations without events. They are a part of the rest.
    for index in sorted({-1, *changes, *totals, len(seconds) - 1}):
        for category, size in changes.get(index, ()):
            now[category] += size
        total = totals.get(index, total)
        moments.append(seconds[index] if index >= 0 else 0.0)
        known = sum(now.values()) - now[REST]
        for name in CATEGORIES:
            held[name].append(now[name])
        if total is not None:
            held[REST][-1] = max(0, total - known)
    return StepMemory(moments, held, {name: spans for name, spans in phases.seconds.items() if spans})
