# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of ZeRO-1/2 on gradients that a reducer has bound.

It does what the ZeRO optimizer's own step does, in as few passes over memory as it takes. One reads gradients for
their norm, from which overflow is told too; one makes the scaled fp32 gradient and releases what it has read. The
optimizer follows, chunk by chunk where it can, and the write-back into this rank's partition of the parameters.
"""

import contextlib

import torch

import deepspeed.comm as dist
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import is_invalid_grad_norm, is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import (
    INITIAL_MICRO_STEP_ID,
    OPTIMIZER_ALLGATHER_TIMER,
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_STEP_TIMER,
    OPTIMIZER_TIMERS,
)

from .chunked_step import MasterGradient, may_step_in_chunks, step_in_chunks
from .flat_layout import flat_layout
from .other_ranks import collective


def run(optimizer):
    """Steps a ZeRO-1/2 optimizer whose ``averaged_gradients`` are PartitionViews, and releases these.

    On overflow nothing is stepped: ``optimizer.overflow`` says so, and the loss scale has been updated.
    """
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    # Of the step before, if that did not wait.
    optimizer._reducer.check_others()
    optimizer._reducer.ask_others()
    optimizer._reducer.use_targets_here()
    norm = optimizer.scaled_global_norm() if optimizer.compute_grad_norm else None
    waits = _host_waits(optimizer, norm)
    if waits or optimizer.bit16_groups_flat[0].is_cpu:
        optimizer._reducer.check_others()
    optimizer._limit.follow_others(optimizer._reducer)
    norm = _check_overflow(optimizer, norm, waits)
    # Gradients carry the scale of their backward, which may change now.
    scale = optimizer.loss_scale
    optimizer._update_scale(optimizer.overflow)
    if optimizer.overflow:
        optimizer._global_grad_norm = None if norm is None else float("inf")
        optimizer.zero_grad(set_to_none=True)
        for name in OPTIMIZER_TIMERS:
            with _timed(optimizer, name):
                pass
        return
    optimizer._global_grad_norm = None if norm is None else norm / scale
    factor = _factor(norm, scale, optimizer.clip_grad, optimizer.bit16_groups_flat[0].device)
    with optimizer._half_step.changing_parameters(optimizer._engine()):
        for group in range(len(optimizer.bit16_groups)):
            _step_group(optimizer, group, factor)
        with _timed(optimizer, OPTIMIZER_ALLGATHER_TIMER):
            optimizer._gather.start()
        for group in range(len(optimizer.bit16_groups)):
            if not _lies_in_flat(optimizer, group):
                # Somebody has given a parameter other memory, for example to swap averaged weights in and out.
                optimizer._update_model_bit16_weights(group)
    optimizer.timers.log(OPTIMIZER_TIMERS)


def _lies_in_flat(optimizer, group):
    flat = optimizer.bit16_groups_flat[group]
    first, size = flat.data_ptr(), flat.element_size()
    layout = ((parameter, offset) for parameter, offset in flat_layout(optimizer, group) if parameter.numel())
    return all(parameter.data_ptr() == first + size * offset for parameter, offset in layout)


def _step_group(optimizer, group, factor):
    master, views = optimizer.single_partition_of_fp32_groups[group], optimizer.averaged_gradients[group]
    optimizer.averaged_gradients[group] = None
    scaler = optimizer.torch_autocast_gradscaler
    if views.flat_partition is None and not scaler and may_step_in_chunks(optimizer.optimizer, master):
        with _timed(optimizer, OPTIMIZER_STEP_TIMER):
            step_in_chunks(optimizer.optimizer, group, MasterGradient(views, factor, master.data))
            # As _optimizer_step() does: a state that was loaded is first stepped here.
            optimizer._lazy_init_hp_params_optimizer_state()
    else:
        with _timed(optimizer, OPTIMIZER_GRADIENTS_TIMER):
            master.grad = _whole_gradient(views, factor, master)
        param_groups = optimizer.optimizer.param_groups
        try:
            with _timed(optimizer, OPTIMIZER_STEP_TIMER):
                optimizer._optimizer_step(group)
        finally:
            # It steps one group by hiding the others, and a checkpoint is loaded into all of them.
            optimizer.optimizer.param_groups = param_groups
            master.grad = None
    rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
    optimizer.parallel_partitioned_bit16_groups[group][rank].data.copy_(master.data)


def _whole_gradient(views, factor, master):
    """Returns the scaled gradient of a partition; the views are empty then."""
    flat = views.flat_partition
    if flat is None:
        return MasterGradient(views, factor, master.data).take(0, master.numel())
    views.release_grad_buffers()
    return flat if factor is None else flat.mul_(factor)


@contextlib.contextmanager
def _timed(optimizer, name):
    optimizer.timers(name).start()
    try:
        yield
    finally:
        optimizer.timers(name).stop()


def norm(optimizer, gradients, parameters):
    """Returns the 2-norm of a parameter group's gradients over all ranks, fp32 and 0-dimensional, -1 if not finite.

    Args:
        optimizer: a ZeRO-1/2 optimizer.
        gradients: this rank's PartitionViews of the group.
        parameters: those in its partition, in the same order.
    """
    whole = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
    counted = [
        gradient
        for gradient, parameter in zip(whole, parameters, strict=True)
        # With model parallelism some parameters lie on several ranks, of which one counts.
        if not getattr(parameter, PIPE_REPLICATED, False)
        and (optimizer.model_parallel_rank == 0 or is_model_parallel_parameter(parameter))
    ]
    # With a dtype, like every tensor made here: torch.set_default_dtype() may have been left on.
    total = torch.zeros((), dtype=torch.float32, device=optimizer.bit16_groups_flat[0].device)
    if counted:
        # Accumulated per tensor in fp32 while it is read, without a copy in another dtype.
        norms = torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float32))
        total = norms.double().square().sum().float()
    with collective("add up the norm of the gradients"):
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)
    optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
    total = total.sqrt()
    return total.masked_fill_(~total.isfinite(), -1.0)


def _host_waits(optimizer, norm):
    """Whether the host waits for the device: where asked to look and, as in DeepSpeed's own step, except in bf16."""
    return optimizer.check_grad_overflow or (norm is not None and optimizer.dtype != torch.bfloat16)


def _check_overflow(optimizer, norm, waits):
    """Sets ``optimizer.overflow``; returns the norm, computed anew if it was not finite but the gradients are."""
    optimizer.overflow = False
    if not waits:
        return norm
    if norm is None:
        optimizer.check_overflow(partition_gradients=optimizer.partition_gradients)
        return None
    if not is_invalid_grad_norm(norm):
        return norm
    # The square of a norm may leave fp32's range where the gradients do not.
    optimizer._norms_exactly = True
    try:
        norm = optimizer.scaled_global_norm()
    finally:
        optimizer._norms_exactly = False
    optimizer.overflow = is_invalid_grad_norm(norm)
    return norm


def _factor(norm, scale, clip, device):
    """What gradients are to be multiplied with, fp32 [1] on ``device``, or None for 1."""
    if clip == 0.0:
        return None if scale == 1.0 else torch.full((1,), 1.0 / scale, dtype=torch.float32, device=device)
    # An infinite norm makes this zero. The small number is part of what torch's clip_grad_norm_() computes too.
    excess = ((norm / scale + 1e-6) / clip).clamp(min=1.0)
    return (1.0 / (excess * scale)).reshape(1)
