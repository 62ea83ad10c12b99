# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of ZeRO-1/2 on gradients that a reducer has bound.

:func:`run` replaces the ZeRO optimizer's own step, in as few passes over memory as possible. One pass reads all
gradients for their norm, which also says whether gradients overflowed (``norm.py``). A second pass steps this rank's
partitions one after the other (``partitions.py``), and releases the gradients of each partition as it takes them. In
the end :func:`run` releases gradients that are left, as after an overflow.
"""

import torch

from deepspeed.runtime.zero.stage_1_and_2 import (
    OPTIMIZER_ALLGATHER_TIMER,
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_TIMERS,
    DeepSpeedZeroOptimizer,
)

from ..layout import lies_in_flat_tensor
from .norm import factors_of, global_norm, overflowed
from .partitions import StepOfGroups, timed


def run(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Steps a ZeRO-1/2 optimizer whose ``averaged_gradients`` are PartitionViews, and releases the gradients.

    On overflow the parameters stay as they are: ``optimizer.overflow`` is true then, and the loss scale is updated.

    Raises:
        RuntimeError: if the step has no gradients, if gradients were dropped, or if ranks sent different gradients.
        DistBackendError: if a collective failed, for example because another rank died.
    """
    backward = optimizer._deepcompile.backward
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
    deepcompile = optimizer._deepcompile
    deepcompile.gather.before_step()
    deepcompile.reducer.compare_and_await_targets()
    deepcompile.backward.read_entries()
    norm = global_norm(optimizer) if optimizer.compute_grad_norm else None
    # Gradients carry the loss scale of their backward: read the scale before _update_scale() changes it.
    scale = optimizer.loss_scale
    transform = deepcompile.transform

    def begin():
        groups = StepOfGroups(optimizer, factors_of(optimizer, norm, scale, deepcompile.transformed))
        groups.prepare()
        return groups

    # Begin before the host waits for the norm, so that the device has work. A transform changes states, so it must
    # wait for the answer. Then clipping takes the norm of the transformed gradients.
    groups = begin() if transform is None else None
    deepcompile.reducer.await_others()
    optimizer.overflow = overflowed(optimizer, norm)
    optimizer._update_scale(optimizer.overflow)
    if optimizer.overflow:
        optimizer._global_grad_norm = None if norm is None else float("inf")
        for name in OPTIMIZER_TIMERS:
            with timed(optimizer, name):
                pass
        return

    with deepcompile.updating():
        if transform is not None:
            with timed(optimizer, OPTIMIZER_GRADIENTS_TIMER):
                transform.run(optimizer)
            norm = None if norm is None else global_norm(optimizer, scale, deepcompile.transformed)
            groups = begin()
        optimizer._global_grad_norm = None if norm is None else norm / scale
        for group in range(len(optimizer.bit16_groups)):
            if not lies_in_flat_tensor(optimizer, group):
                # The caller replaced `parameter.data` (for example to swap in averaged weights): put the parameter
                # back into the flat tensor. Do so before the update, after which a read may wait for the gather.
                optimizer._update_model_bit16_weights(group)
        deepcompile.gather.before_write()
        with deepcompile.placement.sending(optimizer):
            groups.run()
        with timed(optimizer, OPTIMIZER_ALLGATHER_TIMER), torch.profiler.record_function("deepcompile::gather"):
            deepcompile.gather.start()
    optimizer.timers.log(OPTIMIZER_TIMERS)
