# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps an optimizer on the host (``zero_optimization.offload_optimizer``).

DeepSpeed copies new parameters to the device from a host tensor of each partition's size and of the parameters' dtype,
pinned if ``pin_memory`` says so. The gradients of the partition lie in the same memory: the optimizer reads a gradient
before the new parameter is written over it.
"""

import contextlib
import itertools
from typing import TYPE_CHECKING, Dict, Iterator, Optional

import torch

from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.parameter.placement import Placement
from ...zero_1_and_2.parameter.runs import Runs, in_one_run, own_parameters

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from ...zero_1_and_2.gradient.views import PartitionViews


class HostMemory(Placement):
    """Gradients lie in host memory, over which the step writes new parameters before it sends them to the device."""

    on_host = True

    def __init__(self) -> None:
        self._new: Dict[int, torch.Tensor] = {}  # parameter group -> memory of its new parameters

    def gradients(
        self, optimizer: "DeepSpeedZeroOptimizer", group: int, partition_numel: int
    ) -> Optional[torch.Tensor]:
        """Returns host memory, pinned if ``pin_memory`` says so.

        The caller must keep the returned tensor: DeepSpeed may unpin its memory when the tensor is gone.
        """
        dtype, new = optimizer.gradient_accumulation_dtype, optimizer.bit16_groups_flat[group].dtype
        # The base's own memory has another size, and goes when the optimizer is attached.
        self._new[group] = self._allocate(optimizer, partition_numel, new)
        return self._new[group] if new == dtype else self._allocate(optimizer, partition_numel, dtype)

    def _allocate(self, optimizer, numel, dtype):
        pinned = optimizer.cpu_offload_pin_memory
        try:
            # Name the device: the caller may have changed torch's default device.
            make = get_accelerator().pin_empty if pinned else torch.empty
            return make(numel, dtype=dtype, device="cpu")
        except RuntimeError as error:
            raise RuntimeError(
                f"zero_optimization.offload_optimizer: {numel * dtype.itemsize / 2**30:.1f} GiB of "
                f"{'pinned ' if pinned else ''}host memory for gradients could not be allocated; use more ranks"
                f"{', or set offload_optimizer.pin_memory to false' if pinned else ''}"
            ) from error

    def drop_memory_of_base(self, optimizer: "DeepSpeedZeroOptimizer") -> None:
        """Drops the memory of the base's own way to offload gradients, on the host and on the device.

        The base also makes each parameter refer to the optimizer, to note an overflow that the step looks for itself.
        A module that outlives its engine would keep the engine.
        """
        for parameter in itertools.chain.from_iterable(optimizer.bit16_groups):
            # Another engine of the parameters may have set it since.
            if vars(parameter).get("_zero_optimizer") is optimizer:
                del parameter._zero_optimizer
        for group in range(len(optimizer.bit16_groups)):
            optimizer.single_partition_of_fp32_groups[group].grad = None
            optimizer.offload_gradient_dict[group] = None
            if optimizer.cpu_offload_pin_memory:
                get_accelerator().unpin_memory(optimizer.param_buffer_of_bit16_for_cpu_offload_groups[group])
            optimizer.param_buffer_of_bit16_for_cpu_offload_groups[group] = self._new[group]
        optimizer.accumulated_grads_in_cpu.clear()
        optimizer.norm_for_param_grads.clear()
        if optimizer.cpu_offload_pin_memory:
            get_accelerator().unpin_memory(optimizer.temp_grad_buffer_for_cpu_offload)
        optimizer.temp_grad_buffer_for_cpu_offload = optimizer.temp_grad_buffer_for_gpu_offload = None
        if optimizer.reduction_stream is not None:
            # Torch caches unused pinned memory. Older releases have no public function that frees it.
            give_back = getattr(torch.accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", None))
            if give_back is not None:
                give_back()

    def hand_over(self, optimizer: "DeepSpeedZeroOptimizer", group: int, views: "Optional[PartitionViews]") -> None:
        # safe_get_full_grad() reads this dict if the optimizer is offloaded. The dict keeps no memory alive, because
        # the host memory of the gradients stays allocated.
        optimizer.offload_gradient_dict[group] = None if views is None else views.without_padding()

    def new_parameters(self, optimizer: "DeepSpeedZeroOptimizer", group: int) -> Runs:
        return in_one_run(optimizer.param_buffer_of_bit16_for_cpu_offload_groups[group])

    def send(self, optimizer: "DeepSpeedZeroOptimizer", group: int, first: int, last: int) -> None:
        source = self.new_parameters(optimizer, group).read(first, last)
        with get_accelerator().stream(optimizer.reduction_stream):
            own_parameters(optimizer, group).write(first, source)

    @contextlib.contextmanager
    def sending(self, optimizer: "DeepSpeedZeroOptimizer") -> Iterator[None]:
        # Use the base's reduction stream, on which the reducer runs nothing. On a CPU there is none.
        stream = optimizer.reduction_stream
        if stream is not None:
            stream.wait_stream(get_accelerator().current_stream())
        try:
            yield
        finally:
            if stream is not None:
                get_accelerator().current_stream().wait_stream(stream)


class OffloadOptimizer(Feature):
    """Places gradients and new parameters in host memory, where the optimizer is."""

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return bool(getattr(request.engine.optimizer, "cpu_offload", False))

    def __init__(self, context: SetUpContext):
        self.placement = HostMemory()


FEATURE = OffloadOptimizer
