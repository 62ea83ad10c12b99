# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Records the memory of one step with torch's profiler, which also sees what GPUs allocate.

The profiler runs during that step only. It costs time then, and nothing before and after.
"""

import contextlib
import gc
from typing import Dict, Iterable, Iterator, List, Tuple

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from .classify import BEGIN, END, MARK, read_events
from .data import StepMemory

# Category -> tensors that hold memory of this category.
Tensors = Dict[str, List[torch.Tensor]]


def begins(phase: str) -> None:
    """Marks where a phase of the step begins. May be called on any thread that works for the step."""
    with record_function(MARK + phase + BEGIN):
        pass


def ends(phase: str, device: torch.device) -> None:
    """Marks where a phase ends, after waiting for the device, so that the phase lasts as long as on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    with record_function(MARK + phase + END):
        pass


@contextlib.contextmanager
def phase(name: str, device: torch.device) -> Iterator[None]:
    """Context of a phase, one of ``data.PHASES`` but not the gather, which is found in the step."""
    begins(name)
    try:
        yield
    finally:
        ends(name, device)


def storages(tensors: Tensors, device: str) -> Iterator[Tuple[int, int, str]]:
    """Yields (address, bytes, category) of the memory of tensors on a device.

    If tensors of several categories share memory, it counts for the first category.
    """
    seen = set()
    for category, category_tensors in tensors.items():
        for tensor in category_tensors:
            if tensor.device.type != device or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                yield storage.data_ptr(), storage.nbytes(), category


def another_profiler_runs() -> bool:
    """Whether a profiler of torch runs or warms up. This searches all objects of the process."""
    # Torch does not count a profiler that warms up as enabled, but a second profiler would end it.
    return torch.autograd._profiler_enabled() or any(
        issubclass(type(value), profile) and value.current_action is ProfilerAction.WARMUP
        for value in gc.get_objects()
    )


class Recording:
    """The recording of one step. It begins when this object is made.

    Args:
        device: the device whose memory to record.
        standing: tensors that hold memory now.
        uncounted: bytes that are held on the device all the time and that torch's allocator does not count. The part
            of them that is in no tensor of ``standing`` is in the rest.

    Raises:
        RuntimeError: if another profiler runs. Torch has one at a time.
    """

    def __init__(self, device: torch.device, standing: Tensors, uncounted: int = 0):
        # Torch itself would begin, and end the other profiler's recording.
        if another_profiler_runs():
            raise RuntimeError("another profiler runs")
        self._device, self._uncounted = device, uncounted
        self._standing = {address: (size, name) for address, size, name in storages(standing, device.type)}
        self._on_host: Dict[str, int] = {}
        if device.type != "cpu":
            for _, size, name in storages(standing, "cpu"):
                self._on_host[name] = self._on_host.get(name, 0) + size
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)
        self._profiler.start()

    def stop(self, final: Tensors) -> StepMemory:
        """Ends the recording.

        Args:
            final: tensors that hold memory now. Their memory has their category since its allocation.
        """
        self._profiler.stop()
        named = {address: name for address, _, name in storages(final, self._device.type)}
        roots = self._profiler.profiler.kineto_results.experimental_event_tree()
        step = read_events(roots, self._device.type, self._standing, named, self._uncounted)
        step.on_host = self._on_host
        return step

    def drop(self) -> None:
        """Ends the recording without a result."""
        self._profiler.stop()


def flattened(values: Iterable) -> List[torch.Tensor]:
    """Returns the tensors in lists of tensors and other things.

    For a tensor that wraps others, returns the inner tensors: a DTensor's shard, or the parts of a quantized tensor.
    """
    tensors = []
    for value in values:
        if isinstance(value, (list, tuple)):
            tensors += flattened(value)
        elif hasattr(value, "__tensor_flatten__"):
            tensors += flattened(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif torch.is_tensor(value):
            tensors.append(value)
    return tensors
