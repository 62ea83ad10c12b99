# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a ZeRO-1/2 optimizer does differently while its gradients come from a reducer.

The life of a gradient target, seen from the optimizer:

    1. Registered empty   engine.make_reducer()
    2. Reduced            BackwardLife.begin() tells the reducer that a backward starts
    3. Bound              in the reducer, as reduced pieces arrive at their owner
    4. End of backward    BackwardLife.finish(), or abandon() when the backward raised
    5. Handed over        BackwardLife.finish() puts a PartitionViews into averaged_gradients
    6. Released           step.run() as it makes fp32 copies, zero_grad(), destroy()

The native half of the story is told in ``csrc/includes/deepcompile.h``.
"""

import functools
import weakref

import torch

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from . import step
from .layout import registered_parameters
from .state import Zero12

# Optimizers of engines that train.
_attached = weakref.WeakSet()


def _with_current_parameters(name):
    """Returns the base class's method ``name``, preceded by waiting for parameters that are on their way."""

    def method(self, *args, **kwargs):
        self._zero12.gather.wait_all()
        return getattr(super(StepLocalGradients, self), name)(*args, **kwargs)

    method.__name__ = name
    return method


class StepLocalGradients:
    """Mixed into the optimizer's class by :func:`attach`, as FSDP2 does with modules. ``_zero12`` holds all state."""

    # Backward, in the order in which the base calls ---------------------------------------------------------------

    def scale_if_loss(self, value):
        # engine.backward() begins with this call. A backward that is unfinished then was interrupted behind its graph.
        self._zero12.backward.abandon_interrupted()
        return super().scale_if_loss(value)

    def enter_backward(self):
        self._zero12.backward.enter(super().enter_backward)

    def backward_prologue(self):
        self._zero12.refuse()
        hooked = [index for index, parameter in enumerate(self._zero12.registered) if has_hooks(parameter)]
        self._zero12.backward.begin(super().backward_prologue, hooked)

    def backward_epilogue(self, *args, **kwargs):
        super().backward_epilogue(*args, **kwargs)
        self._zero12.backward.finish()

    def overlapping_partition_gradients_reduce_epilogue(self):
        backward = self._zero12.backward
        # engine.coalesce_grad_reduction() ends with this call. An engine whose compile() failed makes it at the end of
        # a backward as well, which backward_epilogue() finishes.
        if backward.in_region or not self._backward_active_depth:
            backward.end_region()

    def setup_buckets(self):
        """Does nothing: the reducer has its own buckets."""

    def reduce_ready_partitions_and_remove_grads(self, *_):
        """Does nothing: the reducer takes what parameters hold when ``coalesce_grad_reduction()`` ends."""

    # Step --------------------------------------------------------------------------------------------------------

    def step(self, closure=None):
        self._zero12.refuse()
        step.run(self)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self._zero12.backward.forget_lost()
        self._zero12.backward.release()

    # Checkpoints and states ----------------------------------------------------------------------------------------

    def state_dict(self):
        self._zero12.reducer.check_others()
        self._zero12.interrupted_step.refuse()
        self._zero12.gather.wait_all()
        return super().state_dict()

    def load_state_dict(self, *args, **kwargs):
        self._zero12.gather.wait_all()
        super().load_state_dict(*args, **kwargs)
        # Whatever the parameters were, they are the checkpoint's now, and a step begins.
        self._zero12.interrupted_step.forget()
        backward = self._zero12.backward
        backward.forget_lost()
        backward.begin_anew()
        backward.release()

    # These read parameters or write them.
    update_lp_params = _with_current_parameters("update_lp_params")
    refresh_fp32_params = _with_current_parameters("refresh_fp32_params")

    def offload_states(self, *args, **kwargs):
        self._zero12.gather.wait_all()
        if OffloadStateTypeEnum.optim_states not in self.offloaded_states:
            self._zero12.states_on_host = [
                (state, name)
                for state in self.optimizer.state.values()
                for name, value in state.items()
                if torch.is_tensor(value) and value.is_cpu
            ]
        super().offload_states(*args, **kwargs)

    def reload_states(self, *args, **kwargs):
        self._zero12.gather.wait_all()
        super().reload_states(*args, **kwargs)
        # The base has moved every tensor to the device. Optimizers of torch keep their counts of steps on the host and
        # read them there, so each step would wait for the device.
        for state, name in self._zero12.states_on_host:
            state[name] = state[name].cpu()

    def _link_all_hp_params(self):
        super()._link_all_hp_params()
        keep_no_graph(self)

    def destroy(self):
        self._zero12.let_go()
        detach(self)
        self.destroy()


@functools.cache
def _with_step_local_gradients(cls):
    return type(f"StepLocal{cls.__name__}", (StepLocalGradients, cls), {"plain_class": cls})


def attach(engine, reducer, limit) -> Zero12:
    """Lets an engine's optimizer take its gradients from ``reducer``. Returns the state that the optimizer now holds.

    Args:
        engine: a DeepSpeedEngine whose optimizer is the ZeRO-1/2 optimizer.
        reducer: the engine's native reducer.
        limit: the engine's ``CompilationLimit``, which learns in each step what the ranks agree on.
    """
    optimizer = engine.optimizer
    optimizer._zero12 = Zero12(engine, reducer, limit)
    reference = weakref.ref(optimizer)

    def begin_unannounced_backward():
        attached = reference()
        if isinstance(attached, StepLocalGradients):
            # DeepSpeed announces only the first backward through the outputs of a forward.
            attached._zero12.engine._backward_prologue()

    reducer.on_unannounced_backward(begin_unannounced_backward)
    # The reducer does the work of the base's hooks now, and holds the memory that contiguous_gradients stands for.
    while optimizer._grad_acc_hooks:
        optimizer._grad_acc_hooks.pop().remove()
    optimizer.contiguous_gradients = False
    keep_no_graph(optimizer)
    optimizer.__class__ = _with_step_local_gradients(type(optimizer))  # type: ignore[arg-type]
    _attached.add(optimizer)
    return optimizer._zero12


def detach(optimizer) -> None:
    """Undoes :func:`attach` but for the base's hooks; for an optimizer that will not train again."""
    optimizer.__class__ = optimizer.plain_class
    _attached.discard(optimizer)
    del optimizer._zero12


def keep_no_graph(optimizer) -> None:
    """Detaches the views of parameters that the base keeps for ``safe_get_full_*``.

    The graph of these views holds the parameters' accumulation nodes. Autograd runs such a node on the stream where it
    was made, and these were made on the stream of ``deepspeed.initialize()``, whatever stream trains the model.
    """
    for group in optimizer.bit16_groups:
        for parameter in group:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                mapping.lp_fragment = mapping.lp_fragment.detach()


def take_over_parameters(optimizer) -> None:
    """Has earlier engines that train any of these parameters give way: the parameters lie in this optimizer's memory.

    DeepSpeed does the same without DeepCompile.
    """
    own = {id(parameter) for parameter in registered_parameters(optimizer)}
    for earlier in list(_attached):
        if any(id(parameter) in own for parameter in earlier._zero12.registered):
            earlier._zero12.taken_over = True
            earlier._zero12.let_go()
            _attached.discard(earlier)


def holds_its_parameters(optimizer) -> bool:
    """Whether parameters lie in the memory of this ZeRO-1/2 optimizer, and not in that of one that was made later."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return True
    return all(
        parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        for flat, group in zip(optimizer.bit16_groups_flat, optimizer.bit16_groups)
        for parameter in group[:1]
    )


def is_attached(optimizer) -> bool:
    """Whether an optimizer takes its gradients from a reducer."""
    return isinstance(optimizer, StepLocalGradients)


def has_hooks(parameter) -> bool:
    """Whether a user's hook wants to see this parameter's gradient, which then has to take autograd's way."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
