# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Inputs of checkpointed layers on the host, of which a backward brings few to the device at a time.

To DeepSpeed: ``CheckpointHiddenStatesOffload`` refers to each input that it brought back until its context ends, for a
second backward through the same graph. So at the end of a backward the inputs of all layers are on the device again.
Please bring them back once more instead, and reuse memory of the host when autograd drops its handle.

Besides, nothing makes the host wait. It runs ahead of the device and asks for the memory of all inputs before the
first copy is done: in a forward for what layers compute, in a backward for what comes back. Please wait for earlier
copies, so far back that the device has work meanwhile.
"""

import collections
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepspeed.runtime.activation_checkpointing.offload_activations import (
        CheckpointHiddenStatesOffload,
        _ActivationOffloadEngine,
    )

# How many inputs may be on their way to the host, or back, when the host starts the next copy.
_ON_THEIR_WAY = 2


def forget_when_dropped(manager: "CheckpointHiddenStatesOffload", handle: Any) -> Any:
    """Returns autograd's handle of an input. When autograd drops it, the input's memory on the host may be reused."""
    dropped = vars(manager).setdefault("_dropped", collections.deque())
    # Python may collect handles at any time, so only note the number. A context that is entered again has other
    # statistics, and numbers its inputs from the beginning.
    weakref.finalize(handle, dropped.append, (manager.stats, handle.tensor_id)).atexit = False
    return handle


def reuse_memory(manager: "CheckpointHiddenStatesOffload") -> None:
    """Called before an input goes to the host or comes back. Gives back the memory of inputs that autograd dropped."""
    dropped = vars(manager).get("_dropped", ())
    while dropped:
        stats, number = dropped.popleft()
        if stats is not manager.stats:
            continue
        manager._keep_last.pop(number, None)
        manager._fwd_stash.pop(number, None)
        tracked = manager._tracker.pop(number, None)
        # The next copy into the memory waits for those out of it: both run on one stream.
        if tracked is not None:
            manager._pool_cpu_buffer(tracked[-1], tracked[0])


def brought_back(manager: "CheckpointHiddenStatesOffload", number: int) -> torch.Tensor:
    """Returns the input of this number on its device. The copy on the host stays, for another backward."""
    reuse_memory(manager)
    tensor = manager._keep_last.get(number)
    if tensor is not None:
        manager.stats.kept_last_tensors += 1
        return tensor
    tracked = manager._tracker.get(number)
    if tracked is None:
        # Raises DeepSpeed's error.
        return manager._restore_tensor(number)
    stashed = manager._fwd_stash.pop(number, None)
    if stashed is None:
        wait_before_bringing_back(manager)
        host, device, shape, stride, _ = tracked
        with manager._stream_context(manager.s1 if manager.use_streams else manager.compute_stream):
            tensor = torch.empty_strided(shape, stride, dtype=host.dtype, device=device)
            tensor.copy_(host, non_blocking=manager.use_streams)
        if manager.use_streams:
            manager.compute_stream.wait_event(manager.s1.record_event())
            tensor.record_stream(manager.compute_stream)
    else:
        tensor = stashed[0]
    manager.stats.restored_tensors += 1
    manager.stats.restored_bytes += manager._num_bytes(tensor)
    return tensor


def wait_after_sending(copies: "_ActivationOffloadEngine") -> None:
    """Called when a copy to the host has started. Waits until few inputs are on their way.

    Only where a layer sends one tensor: DeepSpeed's ``cpu_checkpointing`` sends each argument of a layer.
    """
    if copies.use_streams and _counts_layers(copies):
        _wait(copies, "_sent", copies.s1.record_event(), max(_ON_THEIR_WAY, copies.max_fwd_stash_count))


def wait_before_bringing_back(copies: "_ActivationOffloadEngine") -> None:
    """Called before a copy from the host starts. Waits until the device uses the input that came before."""
    if copies.use_streams and _counts_layers(copies):
        _wait(copies, "_came_back", copies.compute_stream.record_event(), _ON_THEIR_WAY - 1)


def _counts_layers(copies):
    # Here, because that module imports this one.
    from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

    return isinstance(copies, CheckpointHiddenStatesOffload)


def _wait(copies, name, event, most):
    """Notes an event, and waits for the oldest noted one if there are more than ``most``."""
    events = vars(copies).setdefault(name, collections.deque())
    events.append(event)
    if len(events) > most:
        events.popleft().synchronize()
