# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of ZeRO-1/2 on gradients that a reducer has bound.

:func:`run` does what the ZeRO optimizer's own step does, in as few passes over memory as possible:

1. One pass reads the gradients and computes their norm. The norm also says whether gradients overflowed.
2. Where ``compiled_update.py`` has compiled the optimizer's update, one pass reads and scales the gradients, steps the
   master weights, and writes the new parameters into this rank's partition.
3. Otherwise, one pass makes the scaled fp32 gradient, the optimizer steps the master weights, chunk by chunk where
   ``chunked_step.py`` allows chunks, and one pass writes them into this rank's partition of the parameters.

Gradients are released as they are read.
"""

import contextlib
import functools
from typing import TYPE_CHECKING, Iterator, Optional

import torch

import deepspeed.comm as dist
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm, is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import (
    OPTIMIZER_ALLGATHER_TIMER,
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_STEP_TIMER,
    OPTIMIZER_TIMERS,
)

from .chunked_step import Chunks, may_step_in_chunks
from .collectives import collective
from .layout import lies_in_flat_tensor
from .master_gradient import LARGE_NUMEL, MasterGradient
from .offload import memory_for_new_parameters, parameters_on_their_way, send_to_device
from .update_graph import Kind

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# Elements of which a CPU adds up the squares at once: 8 MiB of fp32, which stay in the processor's cache.
NORM_NUMEL_ON_HOST = 2**21


def run(optimizer: "DeepSpeedZeroOptimizer") -> None:
    """Steps a ZeRO-1/2 optimizer whose ``averaged_gradients`` are PartitionViews, and releases the gradients.

    On overflow the parameters stay as they are: ``optimizer.overflow`` is true then, and the loss scale is updated.

    Raises:
        RuntimeError: if the step has no gradients, if gradients were dropped, or if ranks sent different gradients.
        DistBackendError: if a collective failed, for example because another rank died.
    """
    backward = optimizer._zero12.backward
    backward.require_complete()
    try:
        with torch.profiler.record_function("deepcompile::step"):
            _run(optimizer)
    except BaseException:
        # The step does not count and its gradients are dropped: the next micro-batch is the first of a step.
        backward.begin_anew()
        raise
    finally:
        backward.release()


def _run(optimizer):
    zero12 = optimizer._zero12
    zero12.reducer.begin_step()
    zero12.backward.read_entries()
    zero12.limit.step()
    norm = _global_norm(optimizer) if optimizer.compute_grad_norm else None
    # Gradients carry the loss scale of their backward: read the scale before _update_scale() changes it.
    scale = optimizer.loss_scale
    groups = range(len(optimizer.bit16_groups))
    # What the device can compute before the host has waited for the norm, it computes in that time.
    factor = _factor(optimizer, norm, scale)
    in_chunks = [not optimizer.torch_autocast_gradscaler and may for may in may_step_in_chunks(optimizer.optimizer)]
    updates = [_begin_update(optimizer, group, factor is not None) if in_chunks[group] else None for group in groups]
    optimizer.overflow = _host_waits(optimizer, norm) and _overflow(optimizer, norm)
    optimizer._update_scale(optimizer.overflow)
    if optimizer.overflow:
        optimizer._global_grad_norm = None if norm is None else float("inf")
        for name in OPTIMIZER_TIMERS:
            with _timed(optimizer, name):
                pass
        return
    optimizer._global_grad_norm = None if norm is None else norm / scale

    linked = optimizer._hp_optimizer_states_linked
    with zero12.interrupted_step.changing_parameters(zero12.engine):
        with parameters_on_their_way(optimizer) if optimizer.cpu_offload else contextlib.nullcontext():
            _step_groups(optimizer, factor, updates, in_chunks)
        if not linked:
            # In the first step, _optimizer_step() has linked the states of a group before later groups had any.
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        with _timed(optimizer, OPTIMIZER_ALLGATHER_TIMER), torch.profiler.record_function("deepcompile::gather"):
            zero12.gather.start()
        for group in groups:
            if not lies_in_flat_tensor(optimizer, group):
                # The caller replaced `parameter.data` (for example to swap in averaged weights), so the flat tensor no
                # longer backs the parameter: copy.
                optimizer._update_model_bit16_weights(group)
    optimizer.timers.log(OPTIMIZER_TIMERS)


# Norm and overflow ----------------------------------------------------------------------------------------------


def _global_norm(optimizer):
    """Returns the 2-norm of all gradients over all ranks, fp32 [], infinite if a group's norm is invalid."""
    groups = range(len(optimizer.bit16_groups))
    return combine_grad_norm_groups([_group_norm(optimizer, group) for group in groups], norm_type=2)


def _group_norm(optimizer, group):
    """Returns the 2-norm of one group's gradients over all ranks, fp32 [].

    As in the base, the norm is -1 if the sum of the squares is not finite in fp32.
    """
    gradients = optimizer.averaged_gradients[group].without_padding()
    counted = [
        gradient
        for gradient, parameter in zip(gradients, optimizer.params_in_partition[group], strict=True)
        # With model parallelism some parameters lie on several ranks, and one of these ranks counts the gradient.
        if not getattr(parameter, PIPE_REPLICATED, False)
        and (optimizer.model_parallel_rank == 0 or is_model_parallel_parameter(parameter))
    ]
    # As for every new tensor in this file, name the dtype: the caller may have changed torch's default dtype.
    total = torch.zeros((), dtype=torch.float64, device=optimizer.bit16_groups_flat[0].device)
    if counted:
        total.copy_(_sum_of_squares(counted))
    with collective("add up the norm of the gradients"):
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)
    optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
    total = total.float().sqrt()
    return total.masked_fill_(~total.isfinite(), -1.0)


def _sum_of_squares(gradients):
    """Returns the sum of the squares of all elements, fp64 []. The squares of one gradient are added up in fp32."""
    if not gradients[0].is_cpu:
        # One kernel for each large gradient reads memory faster than one kernel for many gradients.
        large = [gradient for gradient in gradients if gradient.numel() >= LARGE_NUMEL]
        small = [gradient for gradient in gradients if gradient.numel() < LARGE_NUMEL]
        norms = [torch.linalg.vector_norm(gradient, 2, dtype=torch.float32) for gradient in large]
        norms += torch._foreach_norm(small, 2, dtype=torch.float32) if small else []
        return torch.stack(norms).double().square().sum()
    # On a CPU a norm takes several times as long as a cast and a product of short parts, and rounds more.
    parts = [part for gradient in gradients for part in gradient.view(-1).split(NORM_NUMEL_ON_HOST)]
    memory = torch.empty(max(part.numel() for part in parts), dtype=torch.float32, device="cpu")
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for part in parts:
        cast = memory[: part.numel()].copy_(part)
        total += torch.dot(cast, cast)
    return total


def _host_waits(optimizer, norm):
    """Whether the host waits for the device, to learn whether gradients overflowed.

    The host waits with ``check_grad_overflow: true``. Otherwise the host waits, as in DeepSpeed's own step, if there
    is a norm and parameters are not in bf16.
    """
    return optimizer.check_grad_overflow or (norm is not None and optimizer.dtype != torch.bfloat16)


def _overflow(optimizer, norm):
    """Returns whether gradients overflowed. The host waits for the device."""
    if norm is None:
        optimizer.check_overflow(partition_gradients=optimizer.partition_gradients)
        return optimizer.overflow
    return is_invalid_grad_norm(norm)


def _factor(optimizer, norm, scale) -> Optional[torch.Tensor]:
    """Returns the factor that unscales and clips gradients, fp32 [1] where master weights are, or None for 1."""
    device = optimizer.single_partition_of_fp32_groups[0].device
    if optimizer.clip_grad == 0.0:
        return None if scale == 1.0 else torch.full((1,), 1.0 / scale, dtype=torch.float32, device=device)
    # With an infinite norm the factor is zero. Torch's clip_grad_norm_() adds 1e-6 to the norm too.
    excess = ((norm / scale + 1e-6) / optimizer.clip_grad).clamp(min=1.0)
    return (1.0 / (excess * scale)).reshape(1).to(device)


# The optimizer --------------------------------------------------------------------------------------------------


def _begin_update(optimizer, group, scaled):
    """Returns the compiled update with which to step a group in this step, or None to have the optimizer step it."""
    updates = optimizer._zero12.updates
    if updates is None:
        return None
    new = _partition(optimizer, group)
    kind = Kind(optimizer.gradient_accumulation_dtype, new.dtype, new.data_ptr() % 16 == 0, scaled)
    return updates.begin(optimizer.optimizer, group, kind)


def _step_groups(optimizer, factor, updates, in_chunks):
    """Steps the master weights of all groups, and writes them into this rank's partition of the parameters.

    Args:
        optimizer: the ZeRO-1/2 optimizer.
        factor: what to multiply gradients by, see :func:`_factor`.
        updates: for each group, what :func:`_begin_update` returned.
        in_chunks: for each group, whether it may be stepped in chunks.
    """
    gather, chunks = optimizer._zero12.gather, {}
    for group, update in enumerate(updates):
        views = optimizer.averaged_gradients[group]
        if update is not None or (views.flat_partition is None and in_chunks[group]):
            optimizer.averaged_gradients[group] = None
            chunks[group] = Chunks(
                optimizer.optimizer,
                group,
                _master_gradient(optimizer, group, views, factor),
                functools.partial(_memory_of_new, optimizer, group),
                functools.partial(_send, optimizer, group),
                update,
            )
    # With offloading, new values are still on their way to the device when they are written.
    if len(chunks) == len(updates) and not optimizer.cpu_offload:
        with _timed(optimizer, OPTIMIZER_STEP_TIMER):
            stepped = [chunks[group].step_first(gather.first_spans(group)) for group in chunks]
        if all(stepped):
            gather.start_first()
    for group in range(len(updates)):
        if group in chunks:
            with _timed(optimizer, OPTIMIZER_STEP_TIMER):
                # Drop the chunks of a group when it is stepped, because they hold memory for gradients.
                chunks.pop(group).step_rest()
        else:
            _step_whole_group(optimizer, group, factor)


def _master_gradient(optimizer, group, views, factor):
    master = optimizer.single_partition_of_fp32_groups[group]
    return MasterGradient(views, factor, master.data, optimizer.gradient_accumulation_dtype)


def _step_whole_group(optimizer, group, factor):
    """Has the optimizer step the master weights of a group at once, and writes them into this rank's partition."""
    master, views = optimizer.single_partition_of_fp32_groups[group], optimizer.averaged_gradients[group]
    optimizer.averaged_gradients[group] = None
    with _timed(optimizer, OPTIMIZER_GRADIENTS_TIMER):
        master.grad = _whole_gradient(optimizer, group, views, factor)
    param_groups = optimizer.optimizer.param_groups
    try:
        with _timed(optimizer, OPTIMIZER_STEP_TIMER):
            optimizer._optimizer_step(group)
    finally:
        # _optimizer_step() hides the other groups, and leaves them hidden if it raises. A checkpoint that is loaded
        # then needs all groups.
        optimizer.optimizer.param_groups = param_groups
        master.grad = None
    _memory_of_new(optimizer, group, 0, master.numel()).copy_(master.data)
    _send(optimizer, group, 0, master.numel())


def _whole_gradient(optimizer, group, views, factor):
    """Returns the scaled gradient of a whole partition, 1-D in the dtype of master weights, and empties ``views``."""
    flat = views.flat_partition
    if flat is None:
        gradient = _master_gradient(optimizer, group, views, factor)
        return gradient.take(0, optimizer.single_partition_of_fp32_groups[group].numel())
    views.release_grad_buffers()
    return flat if factor is None else flat.mul_(factor)


def _memory_of_new(optimizer, group, first, last):
    """Returns the memory in which elements [first, last) of the new parameters are written: with offloading, on the
    host, and otherwise in this rank's partition of the parameters."""
    if optimizer.cpu_offload:
        return memory_for_new_parameters(optimizer, group)[first:last]
    return _partition(optimizer, group).data[first:last]


def _send(optimizer, group, first, last):
    """With offloading, sends elements [first, last) of the new parameters to the device."""
    if optimizer.cpu_offload:
        send_to_device(optimizer, group, first, _partition(optimizer, group).data[first:last])


def _partition(optimizer, group):
    """Returns this rank's partition of the parameters, 1-D."""
    rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
    return optimizer.parallel_partitioned_bit16_groups[group][rank]


@contextlib.contextmanager
def _timed(optimizer, name):
    optimizer.timers(name).start()
    try:
        yield
    finally:
        optimizer.timers(name).stop()


class InterruptedStep:
    """Remembers that a step was interrupted: an exception ended the step while it changed parameters.

    Parameters may differ between ranks then. So the engine refuses to go on until a checkpoint is loaded.
    """

    def __init__(self):
        self._error = None
        self._hooks = []

    @contextlib.contextmanager
    def changing_parameters(self, engine: "DeepSpeedEngine") -> Iterator[None]:
        """Context of the code that changes parameters.

        After an exception in this context, calls of the engine and state dicts of its module raise RuntimeError.
        """
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
        """Called when all ranks have the same parameters again."""
        self._error = None
        while self._hooks:
            self._hooks.pop().remove()
