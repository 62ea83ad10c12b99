# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps an optimizer over a flat partition chunk by chunk, to save memory.

The fp32 gradients of a partition need twice the memory of its bf16 gradients, and the temporaries of an optimizer may
need as much again. If the optimizer treats each element by itself, the fp32 gradients and the temporaries need to
exist only for one chunk at a time.
"""

from typing import TYPE_CHECKING, Callable, Optional

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

if TYPE_CHECKING:
    from .layout import PartitionViews

# Elements of a chunk: 512 MiB of fp32. Kernels over so many elements run at the memory's full speed.
CHUNK_NUMEL = 2**27
# On the host 24 MiB: most of a chunk is still in the processor's cache when the next pass reads it, and the C library
# takes memory of more than 32 MiB from the system anew each time. With less, the threads of each pass would take too
# long to start.
CHUNK_NUMEL_ON_HOST = 3 * 2**21

# Optimizers that treat each element by itself.
_ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, FusedAdam),
    DeepSpeedCPUAdam,
)


class MasterGradient:
    """The scaled gradient of a partition in the dtype of its master weights, made range by range.

    Args:
        views: the PartitionViews of the partition. This object takes the gradients out of them.
        factor: an fp32 tensor [1] with which to multiply gradients, or None for 1.
        like: a tensor of the dtype and on the device of the master weights.
    """

    def __init__(self, views: "PartitionViews", factor: Optional[torch.Tensor], like: torch.Tensor):
        # (offset, gradient), with the lowest offset last, so that pop() takes it.
        self._rest = sorted(views.take(), key=lambda entry: entry[0], reverse=True)
        self._factor = factor
        self._memory = like.new_empty(0)

    def take(self, first: int, last: int) -> torch.Tensor:
        """Returns elements [first, last) of the partition's scaled gradient, 1-D. Padding is zero.

        The next call overwrites what this call returns. Calls must ask for ranges in ascending order. A gradient is
        dropped as soon as all its elements have been taken.
        """
        if self._memory.numel() < last - first:
            with torch.profiler.record_function("deepcompile::master_gradient"):
                self._memory = self._memory.new_empty(last - first)
        gradient, filled = self._memory[: last - first], first
        while self._rest and self._rest[-1][0] < last:
            offset, view = self._rest[-1]
            begin, end = max(offset, first), min(offset + view.numel(), last)
            gradient[filled - first : begin - first].zero_()
            self._scale(view[begin - offset : end - offset], gradient[begin - first : end - first])
            filled = end
            if end < offset + view.numel():
                break
            self._rest.pop()
        gradient[filled - first :].zero_()
        return gradient

    def _scale(self, source, target):
        if self._factor is None:
            target.copy_(source)
        elif target.is_cpu:
            # On a CPU, a product of two dtypes takes several times as long as a cast and a product of one dtype.
            target.copy_(source).mul_(self._factor)
        else:
            # The factor has one dimension, so torch computes the product in the factor's dtype. With a factor without
            # dimensions, torch would compute in the dtype of `source`.
            torch.mul(source, self._factor, out=target)


def may_step_in_chunks(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether stepping ``parameter`` in chunks gives the same result as one step, and no hook would see the chunks."""
    return (
        type(optimizer) in _ELEMENTWISE
        and _is_complete(optimizer.state.get(parameter) or {}, parameter)
        # A step() that was replaced on the instance may count its calls. A learning rate scheduler replaces step() by
        # a function that only notes that a call was made.
        and ("step" not in vars(optimizer) or hasattr(optimizer.step, "_wrapped_by_lr_sched"))
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
    )


def _is_complete(state, parameter):
    # The first step makes the state. A later step makes an entry that is still None, if an option now asks for it.
    return all(
        _is_per_element(value, parameter) or (value.numel() == 1 if torch.is_tensor(value) else value is not None)
        for value in state.values()
    )


def step_in_chunks(
    optimizer: torch.optim.Optimizer, index: int, gradient: MasterGradient, finish: Callable[[int, int], None]
) -> None:
    """Steps the only parameter of ``optimizer.param_groups[index]`` chunk by chunk.

    Args:
        optimizer: an optimizer for which :func:`may_step_in_chunks` is true.
        index: the index of the parameter group.
        gradient: the gradient of the parameter.
        finish: a function to call with (first, last) when the elements [first, last) of the parameter were stepped.
    """
    groups = optimizer.param_groups
    (whole,) = groups[index]["params"]
    state = optimizer.state.get(whole) or {}
    # In the first step, the optimizer makes the state of each chunk.
    is_new = not state
    size = CHUNK_NUMEL_ON_HOST if whole.is_cpu else CHUNK_NUMEL
    for first in range(0, whole.numel(), size):
        last = min(first + size, whole.numel())
        chunk = torch.nn.Parameter(whole.data[first:last])
        chunk.grad = gradient.take(first, last)
        group = {**groups[index], "params": [chunk]}
        if not is_new:
            optimizer.state[chunk] = {name: _part(value, whole, first, last) for name, value in state.items()}
        optimizer.param_groups = [group]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
            of_chunk = optimizer.state.pop(chunk, {})
        if is_new:
            for name, value in of_chunk.items():
                if _is_per_element(value, chunk):
                    if name not in state:
                        state[name] = value.new_empty(whole.shape)
                    state[name][first:last] = value
        finish(first, last)
    # The other states are counts of steps. Each chunk has counted this step, so take the counts of the last chunk.
    for name, value in of_chunk.items():
        if name not in state or not torch.is_tensor(value):
            state[name] = value
        elif not _is_per_element(state[name], whole):
            state[name].copy_(value)
    if state:
        optimizer.state[whole] = state
    groups[index].update((name, value) for name, value in group.items() if name != "params")


def _is_per_element(value, parameter):
    return torch.is_tensor(value) and value.shape == parameter.shape


def _part(value, parameter, first, last):
    if _is_per_element(value, parameter):
        return value[first:last]
    return value.clone() if torch.is_tensor(value) else value
