# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Overrides methods of DeepSpeed's ZeRO-1/2 optimizer while gradients come from a reducer.

``csrc/includes/deepcompile.h`` describes the life of a gradient.
"""

import functools
import weakref
from typing import Any, Callable, Optional

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..engine.state import EngineState
from ..gradient.registered import registered_parameters
from . import step
from .even_order import EvenOrder, even_class

# The attached optimizers whose parameters no later engine has taken over.
attached = weakref.WeakSet()


class StepLocalGradients(EvenOrder):
    """The methods of the base's ZeRO-1/2 optimizer that work differently while an engine's reducer reduces.

    :func:`attach` mixes this class into the class of the optimizer, as FSDP2 does with the classes of modules. The
    attribute ``_deepcompile`` holds all state.
    """

    _deepcompile: EngineState
    _hp_optimizer_states_linked: bool

    # Backward, in the order in which the base calls ---------------------------------------------------------------

    def scale_if_loss(self, value: Any) -> Any:
        # engine.backward() begins with this call. An earlier backward that is still unfinished was interrupted.
        self._deepcompile.backward.abandon_unfinished(may_enclose=True)
        return super().scale_if_loss(value)

    def enter_backward(self) -> None:
        self._deepcompile.backward.enter(super().enter_backward)

    def backward_prologue(self) -> None:
        self._deepcompile.refuse()
        self._deepcompile.backward.begin(super().backward_prologue)

    def backward_epilogue(self, *args, **kwargs) -> None:
        super().backward_epilogue(*args, **kwargs)
        self._deepcompile.backward.finish()

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        # engine.coalesce_grad_reduction() ends with this call.
        self._deepcompile.backward.end_region()

    def setup_buckets(self) -> None:
        """Does nothing: the reducer has its own buckets."""

    def reduce_ready_partitions_and_remove_grads(self, *_) -> None:
        """Does nothing: when a region ends, the reducer takes the gradients that parameters hold."""

    # Steps -------------------------------------------------------------------------------------------------------

    def step(self, closure: Optional[Callable] = None) -> None:
        self._deepcompile.refuse()
        step.run(self)
        if not self.overflow:
            self.link_states()

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Does nothing when the base has stepped one group: the states of all groups are linked after the step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._deepcompile.backward.refuse_to_drop_within()
        # A parameter that is still being gathered waits when Python code uses it. Dropping gradients needs no values.
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)
        self._deepcompile.backward.drop_by_caller()

    # Checkpoints and states are those of a part. The base's two methods below read or write parameters.

    def update_lp_params(self) -> None:
        gather = self._deepcompile.gather
        gather.wait_all()
        gather.before_write()
        super().update_lp_params()
        gather.start()
        gather.wait_all()

    def _restore_from_bit16_weights(self) -> None:
        # The engine calls it where a checkpoint has brought parameters alone.
        self._deepcompile.gather.wait_all()
        super()._restore_from_bit16_weights()

    def destroy(self) -> None:
        self._deepcompile.let_go()
        # The base's gradient hooks stay removed: the optimizer must not train again.
        self.__class__ = self.plain_class
        attached.discard(self)
        del self._deepcompile
        self.destroy()


@functools.cache
def _with_step_local_gradients(cls, *mixins):
    even = even_class(cls)
    return type(f"StepLocal{cls.__name__}", (StepLocalGradients, *mixins, even), {"plain_class": even})


def attach(optimizer: DeepSpeedZeroOptimizer, deepcompile: EngineState) -> None:
    """Makes an optimizer take its gradients from the reducer of ``deepcompile``, the optimizer's new state.

    The optimizer cannot step before :func:`~.even_order.adopt` has put its elements into the order of our layout.
    """
    # The reducer replaces the base's gradient hooks, and its targets replace the memory of contiguous_gradients.
    while optimizer._grad_acc_hooks:
        optimizer._grad_acc_hooks.pop().remove()
    optimizer.contiguous_gradients = False
    optimizer._deepcompile = deepcompile
    mixins = (mixin for part in deepcompile.features for mixin in part.optimizer_mixins)
    optimizer.__class__ = _with_step_local_gradients(type(optimizer), *mixins)  # type: ignore[arg-type]
    deepcompile.placement.drop_memory_of_base(optimizer)
    attached.add(optimizer)


def take_over_parameters(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Stops each earlier engine that trains any of this optimizer's parameters.

    The parameters lie in this optimizer's memory now, so the earlier engine would no longer step them. Without
    DeepCompile, too, the later of two engines trains the parameters.
    """
    taken = {id(parameter) for parameter in registered_parameters(optimizer)}
    for earlier in list(attached):
        if any(id(parameter) in taken for parameter in registered_parameters(earlier)):
            earlier._deepcompile.why_refused = (
                "a later engine has been compiled for this engine's parameters and trains them now; use that one, and "
                "destroy this one"
            )
            earlier._deepcompile.let_go()
            attached.discard(earlier)
