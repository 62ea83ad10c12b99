# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Allocated memory through one step, with the bytes of gradients set apart, as torch's profiler sees it.

Every allocation counts, on CPU and GPU alike. A gradient counts from the moment at which it is handed to whatever
reduces or accumulates it until its memory is freed; what is allocated there for it (buckets, flat partitions, shards)
counts too, and so does a copy of it in another format, such as an optimizer's in fp32.
"""

import dataclasses
from typing import Dict, List, Tuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

PHASES = ("forward", "backward", "step")
RANGE = "benchmark."
AUTOGRAD = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
# Whose first operand is a gradient, or a list of them, given away.
TAKES_GRADIENT = {"deepcompile::reduce_grad", "dc::reduce_grad", "fsdp::chunk_cat", ACCUMULATE}
# In which memory is allocated for gradients only; also what begins with FSDP.
HOLDS_GRADIENT = {
    "deepcompile::reduce_grad",
    "deepcompile::end_backward",
    "dc::reduce_grad",
    "dc::end_backward",
    AUTOGRAD + ACCUMULATE,
}
COPIES_GRADIENT = {"aten::_to_copy", "aten::clone"}
FSDP_BACKWARD = ("FSDP::post_backward", "FSDP::root_post_backward")


@dataclasses.dataclass
class Timeline:
    """Points in time, in the host's order.

    Attributes:
        seconds: since the step began.
        allocated: bytes; on a CPU, beyond what was allocated before the step and still is.
        gradients: bytes among these.
        phases: name -> [(begin, end) in seconds], once a micro-batch.
    """

    seconds: List[float]
    allocated: List[int]
    gradients: List[int]
    phases: Dict[str, List[Tuple[float, float]]]

    def allocated_in(self, phase):
        """Returns the bytes allocated behind the last such phase, and the most in it."""
        begin, end = self.phases[phase][-1]
        before = [bytes for bytes, second in zip(self.allocated, self.seconds) if second <= end]
        within = [bytes for bytes, second in zip(self.allocated, self.seconds) if begin <= second <= end]
        return {"after": before[-1], "peak": max(within, default=before[-1])}

    def most_gradients(self):
        """Returns the most bytes of gradients at any time."""
        return max(self.gradients)

    def thinned(self, points):
        """Returns a timeline of about as many points, keeping the highest of every stretch of time."""
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


def phase(name):
    """Marks a phase of the step for :func:`record`."""
    return record_function(RANGE + name)


def record(step, device, standing=()):
    """Runs ``step()``, whose phases are marked with :func:`phase`, and returns its Timeline.

    Host and device are to meet at the end of each phase.

    Args:
        step: to run.
        device: "cpu" or "cuda", whose memory is meant.
        standing: tensors that hold gradients already.
    """
    blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in standing}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        step()
    return read(profiler.profiler.kineto_results.experimental_event_tree(), device, blocks)


@dataclasses.dataclass
class _Event:
    """An event of the profiler, with what its ancestors say of it."""

    event: object
    holds_gradient: bool
    in_autograd: bool


class _Memory:
    """What is allocated since the recording began, by address.

    Attributes:
        held: bytes.
        of_gradients: bytes among these.
    """

    def __init__(self, standing):
        self.held, self.of_gradients = 0, sum(standing.values())
        self._blocks = {}  # address -> (bytes, whether of a gradient)
        self._standing = dict(standing)  # the same of gradients from before: address -> bytes

    def change(self, address, size, of_gradient):
        """Counts an allocation, or a release (``size`` below 0) of something allocated here."""
        # What a thread without a profiler frees, such as gloo's, shows only when its address is used again.
        self.of_gradients -= self._standing.pop(address, 0)
        freed, was_gradient = self._blocks.pop(address, (0, False))
        self.held -= freed
        self.of_gradients -= freed * was_gradient
        if size > 0:
            self._blocks[address] = (size, of_gradient)
            self.held += size
            self.of_gradients += size * of_gradient

    def give_away(self, address):
        """Counts a block as a gradient's from now on."""
        size, was_gradient = self._blocks.get(address, (0, True))
        if not was_gradient:
            self._blocks[address] = (size, True)
            self.of_gradients += size

    def is_gradient(self, address):
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


def read(roots, device, standing):
    """Returns the Timeline of a profiler's event tree, in which phases are ranges.

    ``standing``: address -> bytes of the gradients that were there before.
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
    copying_until = {}  # thread -> when it will have copied a gradient

    def note(moment, bytes):
        seconds.append(moment)
        allocated.append(bytes)
        gradients.append(memory.of_gradients)

    for entry in entries:
        event, fields = entry.event, entry.event.extra_fields
        moment = (event.start_time_ns - origin) / 1e9
        if event.tag == torch._C._profiler._EventType.Allocation and fields.device.type == device:
            # What engine.backward() allocates around autograd's work is the reducer's too.
            around = not entry.in_autograd and any(begin <= moment <= end for begin, end in phases["backward"])
            copied = event.start_time_ns <= copying_until.get(event.start_tid, 0)
            memory.change(fields.ptr, fields.alloc_size, entry.holds_gradient or around or copied)
            # A GPU's allocator knows of what was allocated before, and of what was freed unseen.
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
