# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The norm of all gradients, whether they overflowed, and the factor that unscales and clips them."""

from typing import Collection, List, Optional, Tuple

import torch

import deepspeed.comm as dist
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm, is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..collectives import collective
from ..layout import layouts_of

# On a GPU, one kernel reads a gradient of so many elements faster than a kernel for many gradients does.
ONE_KERNEL_NUMEL = 2**22
# Elements whose squares a CPU adds up at once: 8 MiB of fp32, which stay in the processor's cache.
NORM_NUMEL_ON_HOST = 2**21
# Gradients of fewer elements are copied together first: a call of torch for each would take longer.
SMALL_NUMEL_ON_HOST = 2**15


def global_norm(
    optimizer: DeepSpeedZeroOptimizer, scale: float = 1.0, unscaled_groups: Collection[int] = ()
) -> torch.Tensor:
    """Returns the 2-norm of all gradients over all ranks, fp32 [], infinite if a group's norm is invalid.

    ``unscaled_groups`` are indices of the parameter groups whose gradients lack ``scale``. The norm includes it.
    """
    device = optimizer.bit16_groups_flat[0].device
    # As for every new tensor of a step, name the dtype: the caller may have changed torch's default dtype.
    squares = torch.zeros(len(optimizer.bit16_groups), dtype=torch.float64, device=device)
    for group, total in enumerate(squares):
        counted, others = _counted(optimizer, group)
        if counted:
            total.copy_(sum_of_squares(counted))
        if others:
            # If these overflow, NaN says so to all ranks.
            total.add_(0.0 * sum_of_squares(others))
    # Reduce all groups at once: an optimizer may have dozens, and each collective costs its latency.
    with collective("add up the norm of the gradients"):
        dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)
    optimizer._model_parallel_all_reduce(tensor=squares, op=dist.ReduceOp.SUM)
    norms = squares.float().sqrt()
    # As in the base, the norm of a group is -1 if the sum of the squares is not finite in fp32.
    norms = norms.masked_fill_(~norms.isfinite(), -1.0).unbind()
    norms = [norm * scale if group in unscaled_groups else norm for group, norm in enumerate(norms)]
    return combine_grad_norm_groups(norms, norm_type=2)


def _counted(optimizer, group):
    """Lists the gradients of a group that this rank counts, and the others."""
    counted: Tuple[List[torch.Tensor], List[torch.Tensor]] = [], []
    gradients = optimizer.averaged_gradients[group].targets()
    for gradient, piece in zip(gradients, layouts_of(optimizer)[group].own_pieces(), strict=True):
        # With model parallelism some parameters lie on several ranks, and one of these ranks counts the gradient.
        counts = not getattr(piece.parameter, PIPE_REPLICATED, False) and (
            optimizer.model_parallel_rank == 0 or is_model_parallel_parameter(piece.parameter)
        )
        counted[not counts].append(gradient)
    return counted


def sum_of_squares(gradients: List[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of the squares of all elements, fp64 [].

    The squares of one gradient are added up in fp32, and on a CPU those of small gradients together.
    """
    if not gradients[0].is_cpu:
        large = [gradient for gradient in gradients if gradient.numel() >= ONE_KERNEL_NUMEL]
        small = [gradient for gradient in gradients if gradient.numel() < ONE_KERNEL_NUMEL]
        norms = [torch.linalg.vector_norm(gradient, 2, dtype=torch.float32) for gradient in large]
        norms += torch._foreach_norm(small, 2, dtype=torch.float32) if small else []
        return torch.stack(norms).double().square().sum()
    # On a CPU a norm takes several times as long as a cast and a product of short parts, and rounds more.
    large = [gradient.view(-1) for gradient in gradients if gradient.numel() >= SMALL_NUMEL_ON_HOST]
    small = [gradient for gradient in gradients if gradient.numel() < SMALL_NUMEL_ON_HOST]
    if small:
        large.append(torch._C._nn.flatten_dense_tensors(small))
    parts = [part for gradient in large for part in gradient.split(NORM_NUMEL_ON_HOST)]
    memory = torch.empty(max(part.numel() for part in parts), dtype=torch.float32, device="cpu")
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for part in parts:
        cast = memory[: part.numel()].copy_(part)
        total += torch.dot(cast, cast)
    return total


def overflowed(optimizer: DeepSpeedZeroOptimizer, norm: Optional[torch.Tensor]) -> bool:
    """Returns whether gradients overflowed, or False if the host does not wait for the device to learn it.

    The host waits with ``check_grad_overflow: true``. Otherwise the host waits, as in DeepSpeed's own step, if there
    is a norm and parameters are not in bf16.
    """
    if not optimizer.check_grad_overflow and (norm is None or optimizer.dtype == torch.bfloat16):
        return False
    if norm is None:
        optimizer.check_overflow(partition_gradients=optimizer.partition_gradients)
        return optimizer.overflow
    return is_invalid_grad_norm(norm)


def factors_of(
    optimizer: DeepSpeedZeroOptimizer,
    norm: Optional[torch.Tensor],
    scale: float,
    unscaled_groups: Collection[int] = (),
) -> List[Optional[torch.Tensor]]:
    """Returns, for each parameter group, the factor that unscales and clips gradients.

    A factor is fp32 [1] on the device of the master weights, or None for 1. ``norm`` is the result of
    :func:`global_norm` for the same ``scale`` and ``unscaled_groups``.
    """
    device = optimizer.single_partition_of_fp32_groups[0].device
    factor = factor_of_unscaled = None
    if optimizer.clip_grad != 0.0:
        if norm is None:
            raise RuntimeError("clip_grad clips gradients by their norm, so set compute_grad_norm to true")
        # With an infinite norm the factor is zero. Torch's clip_grad_norm_() adds 1e-6 to the norm too.
        excess = ((norm / scale + 1e-6) / optimizer.clip_grad).clamp(min=1.0)
        factor = (1.0 / (excess * scale)).reshape(1).to(device)
        factor_of_unscaled = factor * scale
    elif scale != 1.0:
        factor = torch.full((1,), 1.0 / scale, dtype=torch.float32, device=device)
    return [factor_of_unscaled if group in unscaled_groups else factor for group in range(len(optimizer.bit16_groups))]
