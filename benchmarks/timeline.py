# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Allocated memory through one step, with the bytes of gradients set apart, as torch's profiler sees it.

Every allocation counts, on CPU and GPU alike. These count as bytes of gradients:

- a gradient, from when autograd hands it to whatever reduces or accumulates it until its memory is freed,
- memory that the reduction or accumulation allocates for gradients: buckets, flat partitions, shards,
- a copy of a gradient in another format, such as an optimizer's in fp32.
"""

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile, record_function

PHASES = ("forward", "backward", "step")
# How names of the profiler's events begin: of our own ranges with RANGE, and of what autograd runs with AUTOGRAD.
RANGE = "benchmark."
AUTOGRAD = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
# Operators that are handed a gradient, or a list of gradients, as their first operand.
TAKES_GRADIENT = {"deepcompile::reduce_grad", "dc::reduce_grad", "fsdp::chunk_cat", ACCUMULATE}
# All memory that these operators allocate is for gradients. The same is true of ranges that begin with FSDP_BACKWARD.
HOLDS_GRADIENT = {
    "deepcompile::reduce_grad",
    "deepcompile::end_backward",
    "dc::reduce_grad",
    "dc::end_backward",
    AUTOGRAD + ACCUMULATE,
}
# If the first operand of these is a gradient, what they allocate is a copy of it.
COPIES_GRADIENT = {"aten::_to_copy", "aten::clone"}
FSDP_BACKWARD = ("FSDP::post_backward", "FSDP::root_post_backward")


@dataclasses.dataclass
class Timeline:
    """Memory at points in time, in the order in which the host reached them. The lists are equally long.

    Attributes:
        seconds: since the step began.
        allocated: bytes. On a GPU, all that is allocated; on a CPU, what the step has allocated and not freed.
        gradients: bytes of gradients. Gradients from before the step count too, also on a CPU.
        phases: name -> (begin, end) in seconds, for each micro-batch.
    """

    seconds: list[float]
    allocated: list[int]
    gradients: list[int]
    phases: dict[str, list[tuple[float, float]]]

    def allocated_in(self, phase: str) -> dict[str, int]:
        """Returns how many bytes are allocated "after" the last micro-batch's ``phase``, and at the "peak" in it."""
        begin, end = self.phases[phase][-1]
        before = [bytes for bytes, second in zip(self.allocated, self.seconds) if second <= end]
        within = [bytes for bytes, second in zip(self.allocated, self.seconds) if begin <= second <= end]
        return {"after": before[-1], "peak": max(within, default=before[-1])}

    def most_gradients(self) -> int:
        """Returns the most bytes of gradients at any time."""
        return max(self.gradients)

    def thinned(self, points: int) -> "Timeline":
        """Returns a timeline of about ``points`` points.

        It divides the time into equal stretches, and keeps the highest point of each line in each stretch.
        """
        if len(self.seconds) <= points:
            return self
        width = (self.seconds[-1] - self.seconds[0]) / (points // 2) or 1.0
        highest = {}
        for index, second in enumerate(self.seconds):
            for line in (self.allocated, self.gradients):
                slot = (int(second / width), line is self.allocated)
                if slot not in highest or line[index] > line[highest[slot]]:
                    highest[slot] = index
        kept = sorted(set(highest.values()))
        return Timeline(
            [self.seconds[i] for i in kept],
            [self.allocated[i] for i in kept],
            [self.gradients[i] for i in kept],
            self.phases,
        )


def phase(name: str) -> record_function:
    """Returns a context that marks a phase of the step, one of ``PHASES``, for :func:`record`."""
    return record_function(RANGE + name)


def record(step: Callable[[], object], device: str, standing: Iterable[torch.Tensor] = ()) -> Timeline:
    """Runs ``step()`` and returns its timeline.

    Args:
        step: trains one step. It must mark the phases with :func:`phase`, and the host must wait for the device at the
            end of each phase.
        device: whose memory to record, "cpu" or "cuda".
        standing: tensors that hold gradients when the step begins.
    """
    blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in standing}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        step()
    return read(profiler.profiler.kineto_results.experimental_event_tree(), device, blocks)


@dataclasses.dataclass
class _Event:
    """An event of the profiler, with what follows from the events around it.

    Attributes:
        event: of the profiler.
        holds_gradient: whether memory that is allocated in it is for gradients.
        in_autograd: whether autograd ran it.
    """

    event: object
    holds_gradient: bool
    in_autograd: bool


class _Memory:
    """The blocks of memory that were allocated since the recording began, and standing gradients.

    Attributes:
        held: bytes that were allocated since the recording began and not freed.
        of_gradients: bytes of gradients, those of standing gradients included.
    """

    def __init__(self, standing: dict[int, int]):
        self.held, self.of_gradients = 0, sum(standing.values())
        self._blocks = {}  # allocated since the recording began: address -> (bytes, whether of a gradient)
        self._standing = dict(standing)  # gradients from before the recording: address -> bytes

    def change(self, address: int, size: int, of_gradient: bool) -> None:
        """Counts an allocation, or a release (``size`` below 0)."""
        # The profiler does not see what a thread without a profiler frees, such as one of gloo's. So a block that is
        # still known at this address was freed unseen.
        self.of_gradients -= self._standing.pop(address, 0)
        freed, was_gradient = self._blocks.pop(address, (0, False))
        self.held -= freed
        self.of_gradients -= freed * was_gradient
        if size > 0:
            self._blocks[address] = (size, of_gradient)
            self.held += size
            self.of_gradients += size * of_gradient

    def give_away(self, address: int | None) -> None:
        """Counts the block at ``address`` as a gradient's from now on; nothing happens if no block is known there."""
        size, was_gradient = self._blocks.get(address, (0, True))
        if not was_gradient:
            self._blocks[address] = (size, True)
            self.of_gradients += size

    def is_gradient(self, address: int | None) -> bool:
        """Whether the block at ``address`` is known to be a gradient's."""
        return address in self._standing or self._blocks.get(address, (0, False))[1]


def _flatten(roots):
    """Yields every event of the tree, parents before children."""
    stack = [_Event(root, False, False) for root in reversed(roots)]
    while stack:
        entry = stack.pop()
        yield entry
        name = entry.event.name
        holds = entry.holds_gradient or name in HOLDS_GRADIENT or name.startswith(FSDP_BACKWARD)
        in_autograd = entry.in_autograd or name.startswith(AUTOGRAD)
        stack.extend(_Event(child, holds, in_autograd) for child in reversed(entry.event.children))


def read(roots: list, device: str, standing: dict[int, int]) -> Timeline:
    """Returns the timeline of a profiler's event tree.

    Args:
        roots: of the tree. Phases are ranges in it.
        device: as in :func:`record`.
        standing: address -> bytes of the gradients from before the recording.
    """
    entries = sorted(_flatten(roots), key=lambda entry: entry.event.start_time_ns)
    ranges = [entry.event for entry in entries if entry.event.name.startswith(RANGE)]
    origin = ranges[0].start_time_ns
    phases = {name: [] for name in PHASES}
    for event in ranges:
        begin, end = ((moment - origin) / 1e9 for moment in (event.start_time_ns, event.end_time_ns))
        phases[event.name.removeprefix(RANGE)].append((begin, end))

    memory = _Memory(standing)
    seconds, allocated, gradients = [0.0], [0], [memory.of_gradients]
    copying_until = {}  # thread -> nanoseconds at which it ends its last copy of a gradient

    def note(moment, bytes):
        seconds.append(moment)
        allocated.append(bytes)
        gradients.append(memory.of_gradients)

    for entry in entries:
        event, fields = entry.event, entry.event.extra_fields
        moment = (event.start_time_ns - origin) / 1e9
        if event.tag == torch._C._profiler._EventType.Allocation and fields.device.type == device:
            # In the backward phase, what is allocated outside of autograd is allocated by the engine, for gradients.
            around = not entry.in_autograd and any(begin <= moment <= end for begin, end in phases["backward"])
            copied = event.start_time_ns <= copying_until.get(event.start_tid, 0)
            memory.change(fields.ptr, fields.alloc_size, entry.holds_gradient or around or copied)
            # A GPU's allocator keeps the total itself, with blocks from before the recording, and without blocks that
            # were freed unseen.
            total = memory.held if device == "cpu" else fields.total_allocated
            if len(seconds) == 1 and device != "cpu":
                allocated[0] = total - fields.alloc_size
            note(moment, total)
        elif event.name in TAKES_GRADIENT and fields.inputs:
            taken = fields.inputs[0]
            for tensor in taken if isinstance(taken, (list, tuple)) else [taken]:
                memory.give_away(getattr(tensor, "storage_data_ptr", None))
            note(moment, allocated[-1])
        elif event.name in COPIES_GRADIENT and fields.inputs:
            if memory.is_gradient(getattr(fields.inputs[0], "storage_data_ptr", None)):
                copying_until[event.start_tid] = event.end_time_ns
    return Timeline(seconds, allocated, gradients, phases)
