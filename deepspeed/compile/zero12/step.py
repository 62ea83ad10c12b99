# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of ZeRO-1/2 on gradients that a reducer has bound.

:func:`run` does what the ZeRO optimizer's own step does, in as few passes over memory as it takes. One pass reads the
gradients for their norm, from which overflow is told too. One makes the scaled fp32 gradient and releases what it has
read. The optimizer follows, chunk by chunk where it can, and then the write-back into this rank's partition of the
parameters.
"""

import contextlib
from typing import Optional

import torch

import deepspeed.comm as dist
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm, is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import (
    INITIAL_MICRO_STEP_ID,
    OPTIMIZER_ALLGATHER_TIMER,
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_STEP_TIMER,
    OPTIMIZER_TIMERS,
)

from .chunked_step import MasterGradient, may_step_in_chunks, step_in_chunks
from .collectives import collective
from .layout import lies_in_flat_tensor


def run(optimizer) -> None:
    """Steps a ZeRO-1/2 optimizer whose ``averaged_gradients`` are PartitionViews, and releases these.

    On overflow nothing is stepped: ``optimizer.overflow`` says so, and the loss scale has been updated.

    Raises:
        RuntimeError: if the step has no gradients, or lost some.
    """
    backward = optimizer._zero12.backward
    backward.require_complete()
    try:
        with torch.profiler.record_function("deepcompile::step"):
            _run(optimizer)
    except BaseException:
        # The step is not counted, and its gradients are gone.
        backward.begin_anew()
        raise
    finally:
        backward.release()


def _run(optimizer):
    zero12, device = optimizer._zero12, optimizer.bit16_groups_flat[0].device
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID

    # Whether ranks sent the same gradients. With `check_grad_overflow: false` the previous step did not wait for its
    # answer, so that is checked first.
    zero12.reducer.check_others()
    zero12.reducer.ask_others()
    zero12.reducer.use_targets_here()
    norm = _global_norm(optimizer) if optimizer.compute_grad_norm else None
    waits = _host_waits(optimizer, norm)
    if waits or device.type == "cpu":
        zero12.reducer.check_others()
    zero12.limit.follow_others(zero12.reducer)

    # Gradients carry the scale of their backward, which may change now.
    optimizer.overflow, norm = _overflow(optimizer, norm) if waits else (False, norm)
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

    factor = _factor(norm, scale, optimizer.clip_grad, device)
    with zero12.interrupted_step.changing_parameters(zero12.engine):
        for group in range(len(optimizer.bit16_groups)):
            _step_group(optimizer, group, factor)
        with _timed(optimizer, OPTIMIZER_ALLGATHER_TIMER), torch.profiler.record_function("deepcompile::gather"):
            zero12.gather.start()
        for group in range(len(optimizer.bit16_groups)):
            if not lies_in_flat_tensor(optimizer, group):
                # The caller replaced `parameter.data` (for example to swap in averaged weights), so the flat tensor no
                # longer backs the parameter: copy.
                optimizer._update_model_bit16_weights(group)
    optimizer.timers.log(OPTIMIZER_TIMERS)


# Norm and overflow ----------------------------------------------------------------------------------------------


def _global_norm(optimizer):
    """Returns the 2-norm of all gradients over all ranks, fp32 and 0-dimensional; infinite if it is invalid."""
    groups = range(len(optimizer.bit16_groups))
    return combine_grad_norm_groups([_group_norm(optimizer, group) for group in groups], norm_type=2)


def _group_norm(optimizer, group):
    """Returns the same of one parameter group, and -1 if it is not finite, as the base does."""
    views = optimizer.averaged_gradients[group]
    whole = (view for view in views if not getattr(view, "_zero_padding", False))
    counted = [
        gradient
        for gradient, parameter in zip(whole, optimizer.params_in_partition[group], strict=True)
        # With model parallelism some parameters lie on several ranks, of which one counts.
        if not getattr(parameter, PIPE_REPLICATED, False)
        and (optimizer.model_parallel_rank == 0 or is_model_parallel_parameter(parameter))
    ]
    # With a dtype, like every tensor made here: the caller may have left torch.set_default_dtype() on.
    total = torch.zeros((), dtype=torch.float32, device=optimizer.bit16_groups_flat[0].device)
    if counted:
        # Each norm is accumulated in fp32 while its gradient is read, without a copy in another dtype.
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


def _overflow(optimizer, norm):
    """Returns whether gradients overflowed, and their norm, computed anew if only the norm is invalid."""
    if norm is None:
        optimizer.check_overflow(partition_gradients=optimizer.partition_gradients)
        return optimizer.overflow, None
    if is_invalid_grad_norm(norm):
        # The square of a norm may leave fp32's range where the gradients do not. The base squares in
        # fp64.
        norm = optimizer.scaled_global_norm()
    return is_invalid_grad_norm(norm), norm


def _factor(norm, scale, clip, device) -> Optional[torch.Tensor]:
    """Returns what gradients are to be multiplied with, fp32 [1] on ``device``, or None for 1."""
    if clip == 0.0:
        return None if scale == 1.0 else torch.full((1,), 1.0 / scale, dtype=torch.float32, device=device)
    # An infinite norm makes this zero. The small number is part of what torch's clip_grad_norm_() computes too.
    excess = ((norm / scale + 1e-6) / clip).clamp(min=1.0)
    return (1.0 / (excess * scale)).reshape(1)


# The optimizer --------------------------------------------------------------------------------------------------


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


class InterruptedStep:
    """What a step leaves that raised while it changed parameters: these may differ between ranks.

    Refuses to go on with such parameters until others are loaded.
    """

    def __init__(self):
        self._error = None
        self._hooks = []

    @contextlib.contextmanager
    def changing_parameters(self, engine):
        """Within it an exception is remembered, and the engine and its module refuse to be called or exported."""
        try:
            yield
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            self._hooks.append(engine.register_forward_pre_hook(self._refuse))
            self._hooks.append(engine.module.register_state_dict_pre_hook(self._refuse))
            raise

    def _refuse(self, *_):
        self.refuse()

    def refuse(self) -> None:
        """Raises RuntimeError if an exception ended a step while parameters were being changed."""
        if self._error is not None:
            raise RuntimeError(
                f"the last optimizer step was ended half way ({self._error}), so that parameters may differ between "
                "ranks; load a checkpoint with its optimizer states before going on"
            )

    def forget(self) -> None:
        """Called when parameters are whole again."""
        self._error = None
        while self._hooks:
            self._hooks.pop().remove()
