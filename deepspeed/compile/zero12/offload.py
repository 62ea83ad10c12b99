# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where a step writes new parameters, and where gradients lie if ``offload_optimizer`` puts the optimizer on the host.

DeepSpeed has a tensor of each partition's size and of the parameters' dtype, pinned if ``pin_memory`` says so, through
which new parameters go to the device. The gradients of the partition lie in the same memory: the optimizer has read a
gradient before the new parameter is written over it.
"""

import contextlib
import traceback
from typing import TYPE_CHECKING, Iterator, Optional

import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


@contextlib.contextmanager
def explained_pinning(engine: "DeepSpeedEngine") -> Iterator[None]:
    """Context in which an engine makes its optimizer. An error while host memory is pinned is raised with a remedy.

    Raises:
        RuntimeError: if the memory could not be pinned. The message says how much.
    """
    try:
        yield
    except RuntimeError as error:
        # The device may also run out of memory, outside of this function of the accelerator.
        code = getattr(get_accelerator().pin_memory, "__code__", None)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
        tensor = frames[0].f_locals.get("tensor") if frames else None
        if not engine.is_deepcompile_enabled() or tensor is None or "out of memory" not in str(error):
            raise
        raise RuntimeError(
            f"zero_optimization.offload_optimizer: {tensor.nbytes / 2**30:.1f} GiB more of pinned host memory could "
            "not be had; use more ranks, or set offload_optimizer.pin_memory to false"
        ) from error


def memory_for_gradients(optimizer: "DeepSpeedZeroOptimizer", group: int) -> Optional[torch.Tensor]:
    """Returns host memory for the gradients of this rank's partition of a group, or None without offloading.

    Returns:
        A 1-D tensor of ``partition_size`` elements in the gradient accumulation dtype, pinned if ``pin_memory`` says
        so. The caller must keep this object: DeepSpeed may unpin its memory when the object is gone.

    Raises:
        RuntimeError: if the memory cannot be had.
    """
    if not optimizer.cpu_offload:
        return None
    dtype = optimizer.gradient_accumulation_dtype
    # The base has two tensors of this size: one in the parameters' dtype, and the gradient of the master weights.
    for tensor in (optimizer.param_buffer_of_bit16_for_cpu_offload_groups[group], _master(optimizer, group).grad):
        if tensor is not None and tensor.dtype == dtype:
            return tensor
    numel, pinned = int(optimizer.partition_size[group]), optimizer.cpu_offload_pin_memory
    try:
        # A default device of torch that the caller has set must not apply.
        make = get_accelerator().pin_empty if pinned else torch.empty
        return make(numel, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise RuntimeError(
            f"zero_optimization.offload_optimizer: {numel * dtype.itemsize / 2**30:.1f} GiB of "
            f"{'pinned ' if pinned else ''}host memory for gradients could not be had; use more ranks"
            f"{', or set offload_optimizer.pin_memory to false' if pinned else ''}"
        ) from error


def drop_unused_memory(optimizer: "DeepSpeedZeroOptimizer") -> None:
    """Drops memory that the base keeps for its own way of offloading gradients, on the host and on the device."""
    for group in range(len(optimizer.bit16_groups)):
        _master(optimizer, group).grad = None
        optimizer.offload_gradient_dict[group] = None
    optimizer.accumulated_grads_in_cpu.clear()
    optimizer.norm_for_param_grads.clear()
    if optimizer.cpu_offload_pin_memory:
        get_accelerator().unpin_memory(optimizer.temp_grad_buffer_for_cpu_offload)
    optimizer.temp_grad_buffer_for_cpu_offload = optimizer.temp_grad_buffer_for_gpu_offload = None
    if optimizer.reduction_stream is not None:
        # Torch keeps pinned memory that nobody uses any more. Older releases have no public function to give it back.
        give_back = getattr(torch.accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", None))
        if give_back is not None:
            give_back()


def memory_for_new_parameters(optimizer: "DeepSpeedZeroOptimizer", group: int) -> torch.Tensor:
    """Returns the memory in which the step writes the new parameters of this rank's partition, 1-D.

    Without offloading this is the partition. With offloading it is the host memory through which new parameters go to
    the device. The gradient of an element may lie where its new value is written.
    """
    if optimizer.cpu_offload:
        return optimizer.param_buffer_of_bit16_for_cpu_offload_groups[group]
    return _partition(optimizer, group)


def send_to_device(optimizer: "DeepSpeedZeroOptimizer", group: int, first: int, last: int) -> None:
    """With offloading, copies elements [first, last) of a partition's new parameters to the device.

    The copy is queued on a stream of its own: :func:`parameters_on_their_way` has the current stream wait for it.
    """
    if optimizer.cpu_offload:
        source = memory_for_new_parameters(optimizer, group)[first:last]
        with get_accelerator().stream(optimizer.reduction_stream):
            _partition(optimizer, group)[first:last].copy_(source, non_blocking=True)


@contextlib.contextmanager
def parameters_on_their_way(optimizer: "DeepSpeedZeroOptimizer") -> Iterator[None]:
    """Context of calls of :func:`send_to_device`: orders its copies after the current stream's work and before later
    work.

    The base's stream of reductions is free: the reducer has its own way of overlapping. On CPU there is none. Without
    offloading nothing is sent, and no stream waits.
    """
    stream = optimizer.reduction_stream if optimizer.cpu_offload else None
    if stream is not None:
        stream.wait_stream(get_accelerator().current_stream())
    try:
        yield
    finally:
        if stream is not None:
            get_accelerator().current_stream().wait_stream(stream)


def _partition(optimizer, group):
    """Returns this rank's partition of the parameters, 1-D."""
    rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
    return optimizer.parallel_partitioned_bit16_groups[group][rank].data


def _master(optimizer, group):
    return optimizer.single_partition_of_fp32_groups[group]
