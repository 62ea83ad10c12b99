# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer over a flat partition, a chunk at a time.

A partition has fp32 gradients of twice its bf16 gradients' size, and an optimizer may need temporaries of that size
again. Where it treats each element by itself, they need never exist all at once.
"""

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from deepspeed.ops.adam import FusedAdam

# Elements of a chunk: 512 MiB of fp32. Kernels over that many run at the memory's full speed.
CHUNK_NUMEL = 2**27

_ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, FusedAdam),
)


class MasterGradient:
    """The gradient of a partition in the dtype of its master weights, made as it is asked for.

    Args:
        views: PartitionViews, which are empty from now on.
        factor: what to multiply gradients with, a tensor [1] in the master weights' dtype, or None for 1.
        like: a tensor of the dtype and on the device of the master weights.
    """

    def __init__(self, views, factor, like):
        # The last one in the list is the next.
        self._rest = sorted(views.take(), key=lambda entry: entry[0], reverse=True)
        self._factor, self._like = factor, like

    def take(self, first, last):
        """Returns elements [first, last); those in front of ``last`` must not be asked for again.

        Gradients are dropped as soon as all of their elements have been taken. Padding between them is zero.
        """
        gradient, filled = self._like.new_empty(last - first), first
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
        else:
            # A factor of one dimension, not of none, has the product computed in its own dtype.
            torch.mul(source, self._factor, out=target)


def may_step_in_chunks(optimizer, parameter):
    """Whether stepping ``parameter`` in chunks is the same as stepping it whole, and nobody would see it."""
    return (
        type(optimizer) in _ELEMENTWISE
        and _is_complete(optimizer.state.get(parameter), parameter)
        # Replaced, it may count its calls. A learning rate's schedule replaces it to see whether there was one.
        and ("step" not in vars(optimizer) or hasattr(optimizer.step, "_wrapped_by_lr_sched"))
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
    )


def _is_complete(state, parameter):
    # The first step makes the state, and a later one what has been asked for since.
    return bool(state) and all(
        _is_per_element(value, parameter) or (value.numel() == 1 if torch.is_tensor(value) else value is not None)
        for value in state.values()
    )


def step_in_chunks(optimizer, index, gradient):
    """Steps the only parameter of ``optimizer.param_groups[index]``.

    Args:
        optimizer: for which :func:`may_step_in_chunks` is true.
        index: of the parameter group.
        gradient: the MasterGradient.
    """
    groups = optimizer.param_groups
    (whole,) = groups[index]["params"]
    state = optimizer.state[whole]
    for first in range(0, whole.numel(), CHUNK_NUMEL):
        last = min(first + CHUNK_NUMEL, whole.numel())
        chunk = torch.nn.Parameter(whole.data[first:last])
        chunk.grad = gradient.take(first, last)
        group = {**groups[index], "params": [chunk]}
        of_chunk = {name: _part(value, whole, first, last) for name, value in state.items()}
        optimizer.state[chunk] = of_chunk
        optimizer.param_groups = [group]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
            of_chunk = optimizer.state.pop(chunk)
    # Counts of steps: every chunk has counted this one.
    for name, value in state.items():
        if torch.is_tensor(value) and not _is_per_element(value, whole):
            value.copy_(of_chunk[name])
        elif not torch.is_tensor(value):
            state[name] = of_chunk[name]
    groups[index].update((name, value) for name, value in group.items() if name != "params")


def _is_per_element(value, parameter):
    return torch.is_tensor(value) and value.shape == parameter.shape


def _part(value, parameter, first, last):
    if _is_per_element(value, parameter):
        return value[first:last]
    return value.clone() if torch.is_tensor(value) else value
