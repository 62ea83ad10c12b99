# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The master weights of an optimizer that keeps their remainders.

The base holds an fp32 tensor of each partition, which is the parameter of the inner optimizer: its identity, shape,
dtype and device matter. Here that tensor is an expanded view of one NaN. Code that is not listed here reads NaN, and
``copy_()`` into the tensor raises.

These functions get or set master weights, by ``masters_in_optimizer.py``:

- ``state_dict()`` and ``load_state_dict()`` of the ZeRO-1/2 optimizer, hence checkpoints of all kinds: an fp32 tensor
  of the whole partition on the host, for the time of the call and as long as the caller keeps the state dict;
- ``refresh_fp32_params()``, which needs no memory. ``update_lp_params()`` copies nothing: a parameter is a part of its
  master weight, so neither can bring the other back;
- ``offload_states()`` and ``reload_states()``, which move the remainders;
- ``safe_get_full_fp32_param()`` and ``safe_set_full_fp32_param()``, and ``_hp_mapping`` of a parameter: its part of
  the partition. ``_hp_mapping`` returns a copy, so a write into it has no effect.
"""

import contextlib
import weakref
from typing import Iterator, List, Union

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.parameter.gather import AllGather
from ...zero_1_and_2.parameter.runs import Runs, own_parameters
from .remainders import join, split

# Elements to convert at once. A conversion makes several tensors of integers, as large as the fp32 values.
_CONVERTED = 2**24


def _pieces(values):
    """Yields slices of 1-D values, with as many elements as are converted at once."""
    return (slice(first, first + _CONVERTED) for first in range(0, values.numel(), _CONVERTED))


def parameters_of(masters: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the parameters of master weights of any shape: bf16, 1-D, on a device."""
    masters = masters.detach().flatten()
    parameters = torch.empty(masters.numel(), dtype=torch.bfloat16, device=device)
    for piece in _pieces(masters):
        parameters[piece] = split(masters[piece].to(device, torch.float32))[0]
    return parameters


class Masters:
    """The master weights of this rank's partitions.

    Args:
        gather: sends the stepped parameters.

    Attributes:
        remainders: remainders of this rank's partitions, by parameter group, int16 1-D. None before
            :meth:`take_apart`.
        on_host: whether the base's list of partitions has all master weights, for the time of a call.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, gather: AllGather):
        self._optimizer = weakref.ref(optimizer)
        self.gather = gather
        self.remainders: List[torch.Tensor] = []
        self.on_host = False

    def take_apart(self) -> None:
        """Splits the base's master weights into parameters and remainders, and frees their memory. The parameters of
        this rank's partitions may change in their last bit, so all ranks must call :meth:`send_parameters` then."""
        masters = self._optimizer().single_partition_of_fp32_groups
        for group, master in enumerate(masters):
            self.remainders.append(torch.zeros_like(master.data, dtype=torch.int16))
            self.set(group, 0, master.data)
        # Only now: while a split may still raise, the master weights are those of the engine without remainders.
        for master in masters:
            master.data = master.data.new_full((1,), torch.nan).expand(master.shape)

    def send_parameters(self) -> None:
        """Sends the parameters of all partitions to all ranks, which call this together."""
        self.gather.start()
        self.gather.wait_all()

    def _parameters(self, group: int) -> Runs:
        """Returns the parameters of this rank's partition, which may be on the host."""
        return own_parameters(self._optimizer(), group)

    @contextlib.contextmanager
    def written_on_host(self) -> Iterator[None]:
        """Context in which the base's list of partitions has the master weights, in host memory. Values that the
        caller writes there become the master weights.

        The inner optimizer keeps its own parameters, whose device is that of the states that it loads. All ranks leave
        the context together. If they raise, remainders stay as they were.
        """
        self.refuse_offloaded("load a checkpoint")
        optimizer = self._optimizer()
        before = optimizer.single_partition_of_fp32_groups
        optimizer.single_partition_of_fp32_groups = [self.on_the_host(group) for group in range(len(before))]
        self.on_host = True
        try:
            yield
            values = optimizer.single_partition_of_fp32_groups
        finally:
            optimizer.single_partition_of_fp32_groups, self.on_host = before, False
        for group, master in enumerate(values):
            self.set(group, 0, master)
        self.send_parameters()

    def on_the_host(self, group: int) -> torch.Tensor:
        """Returns the master weights of this rank's partition, fp32 1-D, in host memory."""
        return self.get(group, 0, self.remainders[group].numel(), device="cpu")

    def get(self, group: int, first: int, last: int, device: Union[str, torch.device, None] = None) -> torch.Tensor:
        """Returns elements [first, last) of the master weights of this rank's partition, fp32 1-D.

        By default, on the device of the parameters.
        """
        parameters, remainders = self._parameters(group), self.remainders[group][first:last]
        values = torch.empty(last - first, dtype=torch.float32, device=device or parameters.device)
        for piece in _pieces(values):
            part = parameters.read(first + piece.start, min(first + piece.stop, last))
            values[piece] = join(part, remainders[piece].to(parameters.device))
        return values

    def set(self, group: int, first: int, values: torch.Tensor) -> None:
        """Sets the master weights of this rank's partition from element ``first`` on to values, 1-D."""
        parameters, remainders = self._parameters(group), self.remainders[group][first : first + values.numel()]
        for piece in _pieces(values):
            part, remainders[piece] = split(values[piece].to(parameters.device, torch.float32))
            parameters.write(first + piece.start, part)

    def take_parameters(self) -> None:
        """Sets the master weights to the values of the parameters."""
        for remainders in self.remainders:
            remainders.zero_()

    def refuse_offloaded(self, purpose: str) -> None:
        """Raises RuntimeError if parameters are on the host, where a new value would not reach the other ranks."""
        if OffloadStateTypeEnum.lp_params in self._optimizer().offloaded_states:
            raise RuntimeError(
                f"with compile.store_param_remainders a parameter is a part of its master weight, and parameters are "
                f"offloaded; call engine.reload_states() to {purpose}"
            )

    def offload(self, pin_memory: bool, non_blocking: bool) -> None:
        """Moves the remainders to the host."""
        make = get_accelerator().pin_empty_like if pin_memory else torch.empty_like
        buffers = [make(remainders, device="cpu") for remainders in self.remainders]
        if pin_memory:
            # The base unpins these buffers, and keeps them until a copy from them has ended.
            self._optimizer().hp_params_pin_buffers = buffers
        for remainders, buffer in zip(self.remainders, buffers, strict=True):
            remainders.data = buffer.copy_(remainders, non_blocking=non_blocking)

    def reload(self, non_blocking: bool) -> None:
        """Moves the remainders to the device."""
        for remainders in self.remainders:
            remainders.data = remainders.data.to(get_accelerator().current_device_name(), non_blocking=non_blocking)
