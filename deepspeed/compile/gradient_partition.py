# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The life of a gradient target, seen from the ZeRO-1/2 optimizer.

    1. Registered empty   make_reducer()
    2. Reduced            StepLocalGradients.backward_prologue() tells the reducer that a backward starts
    3. Bound              in the reducer, as reduced pieces arrive at their owner
    4. End of backward    StepLocalGradients.backward_epilogue(), or abandon_backward() when it raised
    5. Handed over        StepLocalGradients.hand_over() puts a PartitionViews into averaged_gradients
    6. Released           partition_step.run() as it makes fp32 copies, zero_grad(), destroy()

Which backwards make up a step, and what becomes of it when one raises, is in ``step_progress.py``. The native half of
the story is told in ``csrc/includes/deepcompile.h``.
"""

import functools
import weakref
from typing import NamedTuple, Optional

import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger

from . import partition_step
from .flat_layout import flat_layout, registered_parameters
from .half_step import HalfStep
from .native import reducer_module
from .other_ranks import collective
from .parameter_gather import AllGather
from .step_progress import StepProgress

_last_identity = 0
# Optimizers of engines that train.
_attached = weakref.WeakSet()


class ViewSpec(NamedTuple):
    """One entry of ``averaged_gradients[group]``: a run of this rank's partition.

    Offset and numel are in elements. ``shape`` is None for part of a parameter and for padding.
    """

    offset: int
    numel: int
    shape: Optional[torch.Size]
    is_padding: bool = False


class PartitionViews(list):
    """``averaged_gradients[group]``: a gradient for each parameter in the partition, in partition order.

    Attributes and methods have the names of the base's own entries, which its code and its users' code look for.

    Args:
        targets: offset -> 1-D tensor in the gradient accumulation dtype, for each parameter in the partition.
        flat_partition: the 1-D tensor of ``partition_size`` elements in which they all lie, or None if each lies
            where it was reduced.
        specs: a ViewSpec for each parameter and each run of padding.
        padding: a tensor without elements, of the targets' dtype and on their device.
        release: forgets the targets in the reducer.
    """

    def __init__(self, targets, flat_partition, specs, padding, release):
        super().__init__()
        self.flat_partition = flat_partition
        self._targets = targets
        self._specs = specs
        self._padding = padding
        self._release = release
        self._cut()

    def _cut(self):
        views = []
        for spec in self._specs:
            if spec.is_padding:
                # Nothing was reduced for it, but parameters are found by their place in this list.
                view = self._padding.detach()
                # The norm skips it so that views and parameters pair up.
                view._zero_padding = True
            else:
                view = self._targets[spec.offset]
                view = view if spec.shape is None else view.view(spec.shape)
            views.append(view)
        self[:] = views

    def move_flat_partition(self, device, non_blocking=False):
        """Moves the gradients to ``device``, as ``offload_states()`` asks."""
        self._padding = self._padding.to(device)
        if self.flat_partition is None:
            for target in self._targets.values():
                target.data = target.data.to(device, non_blocking=non_blocking)
        else:
            flat = self.flat_partition
            flat.data = flat.data.to(device, non_blocking=non_blocking)
            for offset, target in self._targets.items():
                target.data = flat.data.narrow(0, offset, target.numel())
        self._cut()

    def take(self):
        """Yields (offset in elements, 1-D gradient) of each, which nothing here holds any longer.

        So memory is free again as soon as the caller drops one.
        """
        targets = self._targets
        self.release_grad_buffers()
        while targets:
            yield targets.popitem()

    def release_grad_buffers(self):
        """Drops the gradients here and in the reducer. May be called more than once."""
        self.clear()
        self.flat_partition = None
        self._targets = {}
        self._release()


class _BackwardWatch:
    """Tells an optimizer when autograd is through with the graph of a backward, or when that raised.

    Queued as a callback of the running autograd graph task. The task calls it at the end of a backward and
    drops it, uncalled, when the backward raised; no other extension point of autograd tells of that.
    """

    def __init__(self, optimizer, serial):
        self._watched = functools.partial(_watched, weakref.ref(optimizer), serial)
        # Not a __del__: Python code that runs while the graph task is dropped would raise a pending KeyboardInterrupt
        # there, where nobody can catch it. Where the backward did not raise, no code is to run then.
        self._dropped = weakref.finalize(self, _abandon, self._watched)
        self._dropped.atexit = False

    def __call__(self):
        self._dropped.detach()
        optimizer = self._watched()
        if optimizer is not None:
            optimizer._progress.graph_ended()


def _watched(reference, serial):
    """Returns the optimizer unless another backward has started since, or this one was abandoned."""
    optimizer = reference()
    attached = isinstance(optimizer, StepLocalGradients)
    return optimizer if attached and optimizer._progress.serial == serial else None


def _abandon(watched):
    optimizer = watched()
    if optimizer is not None:
        optimizer._abandon_backward()


def _with_current_parameters(name):
    """Returns the base class's method ``name``, preceded by waiting for parameters that are on their way."""

    def method(self, *args, **kwargs):
        self._gather.wait_all()
        return getattr(super(StepLocalGradients, self), name)(*args, **kwargs)

    method.__name__ = name
    return method


class StepLocalGradients:
    """What a ZeRO-1/2 optimizer does differently while its gradients come from a reducer.

    Mixed into the optimizer's class by :func:`attach`, as FSDP2 does with modules.
    """

    def backward_prologue(self):
        self._refuse_if_taken_over()
        self._half_step.refuse()
        engine, progress = self._engine(), self._progress
        # The backward of several losses at once comes here for each of them.
        graph_task = torch._C._current_graph_task_id()
        if progress.left_behind(graph_task, engine._running_engine_backward):
            self._abandon_unfinished_backward()
        if self._coalesce_grad_reduction and progress.enter_block():
            self.release_gradients()
        if progress.replaces_gradients():
            self.release_gradients()
        progress.restart_count()
        super().backward_prologue()
        hooked = [index for index, parameter in enumerate(self._registered) if has_hooks(parameter)]
        self._reducer.begin_backward(self._reduces_now(), hooked)
        serial = progress.begin(graph_task)
        if graph_task != -1:
            torch.autograd.Variable._execution_engine.queue_callback(_BackwardWatch(self, serial))

    def scale_if_loss(self, value):
        # engine.backward() begins with this: what one before it left was interrupted behind its graph.
        if self._progress.left_behind(None):
            self._abandon_unfinished_backward()
        return super().scale_if_loss(value)

    def enter_backward(self):
        # The backward of several outputs at once comes here for each of them, but only once to exit_backward().
        if self._backward_active_depth == 0:
            # That of the backward before has run, but only a forward makes DeepSpeed queue another.
            self._backward_hook_state.post_backward_callback_queued = False
            super().enter_backward()

    def backward_epilogue(self, *args, **kwargs):
        super().backward_epilogue(*args, **kwargs)
        self._reduce_rest(self._reduces_now())
        self._progress.finish()

    def overlapping_partition_gradients_reduce_epilogue(self):
        # An engine whose compile() failed comes here at the end of a backward, which backward_epilogue() is to finish.
        if self._backward_active_depth and not self._progress.in_block:
            return
        # engine.coalesce_grad_reduction() ends with this: what its backwards kept on this rank is reduced now.
        try:
            self._abandon_unfinished_backward()
            if self._progress.finished:
                self._reduce_rest(True)
        finally:
            self._progress.leave_block()

    def setup_buckets(self):
        """The reducer has its own."""

    def reduce_ready_partitions_and_remove_grads(self, *_):
        """The reducer takes what parameters hold when ``coalesce_grad_reduction()`` ends."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self._progress.take_lost()
        self.release_gradients()

    def step(self, closure=None):
        self._refuse_if_taken_over()
        self._half_step.refuse()
        self._abandon_unfinished_backward()
        lost = self._progress.take_lost()
        if lost:
            self.release_gradients()
            self._progress.begin_anew()
            raise RuntimeError(
                f"gradients of {lost} backwards that belong to this step were dropped when a later one raised, so the "
                "step was not taken; call engine.optimizer.zero_grad() and run all of its micro-batches again"
            )
        if any(self.averaged_gradients.get(group) is None for group in range(len(self.bit16_groups))):
            self._progress.begin_anew()
            raise RuntimeError(
                "optimizer.step() found no gradients: run a backward at the gradient accumulation "
                "boundary first (they are dropped by step(), zero_grad() and a backward that raised)"
            )
        try:
            partition_step.run(self)
        except BaseException:
            # It is not counted, and its gradients are gone.
            self._progress.begin_anew()
            raise
        finally:
            self.release_gradients()

    def get_grad_norm_direct(self, gradients, params, norm_type=2):
        if self._norms_exactly or norm_type != 2:
            return super().get_grad_norm_direct(gradients, params, norm_type)
        return partition_step.norm(self, gradients, params)

    def state_dict(self):
        self._reducer.check_others()
        self._half_step.refuse()
        self._gather.wait_all()
        return super().state_dict()

    def load_state_dict(self, *args, **kwargs):
        self._gather.wait_all()
        super().load_state_dict(*args, **kwargs)
        # Whatever the parameters were, they are the checkpoint's now, and a step begins.
        self._half_step.forget()
        self._progress.take_lost()
        self._progress.begin_anew()
        self.release_gradients()

    # These read parameters or write them.
    update_lp_params = _with_current_parameters("update_lp_params")
    refresh_fp32_params = _with_current_parameters("refresh_fp32_params")

    def offload_states(self, *args, **kwargs):
        self._gather.wait_all()
        if OffloadStateTypeEnum.optim_states not in self.offloaded_states:
            self._states_on_host = [
                (state, name)
                for state in self.optimizer.state.values()
                for name, value in state.items()
                if torch.is_tensor(value) and value.is_cpu
            ]
        super().offload_states(*args, **kwargs)

    def reload_states(self, *args, **kwargs):
        self._gather.wait_all()
        super().reload_states(*args, **kwargs)
        # The base has moved every tensor to the device. Optimizers of torch keep their counts of steps on the host and
        # read them there, so each step would wait for the device.
        for state, name in self._states_on_host:
            state[name] = state[name].cpu()

    def _link_all_hp_params(self):
        super()._link_all_hp_params()
        keep_no_graph(self)

    def when_destroyed(self, undo):
        """Has ``undo()`` called by :meth:`destroy`."""
        self._undo.append(undo)

    def destroy(self):
        self._let_go()
        detach(self)
        self.destroy()

    def give_way(self):
        """Leaves parameters and module to a later engine, as DeepSpeed does without DeepCompile."""
        self._taken_over = True
        self._let_go()

    def _let_go(self):
        self.release_gradients()
        self._half_step.forget()
        self._reducer.close()
        self._around_forward = None
        while self._undo:
            # One that is interrupted is not begun a second time.
            self._undo.pop(0)()

    def _refuse_if_taken_over(self):
        if self._taken_over:
            raise RuntimeError(
                "a later engine has been compiled for this engine's parameters and trains them now; use that one, and "
                "destroy this one"
            )

    def hand_over(self):
        """Makes what is bound this step's ``averaged_gradients``."""
        for group, specs in enumerate(self._view_specs):
            # The dict is never replaced: parameters hold a reference to it for safe_get_full_grad().
            self.averaged_gradients[group] = PartitionViews(
                self._reducer.targets(group),
                self._reducer.flat_partition(group),
                specs,
                self.bit16_groups_flat[group].new_empty(0, dtype=self.gradient_accumulation_dtype),
                functools.partial(self._reducer.release, group),
            )
        self._progress.hand_over()

    def release_gradients(self):
        """Drops every gradient that this rank holds, reduced or not."""
        self._progress.forget()
        for group, views in list(self.averaged_gradients.items()):
            if isinstance(views, PartitionViews):
                views.release_grad_buffers()
            self.averaged_gradients[group] = None
        self._reducer.release_all()

    def _reduces_now(self):
        engine = self._engine()
        if engine.inside_no_sync_ctxt:
            return False
        return self.partition_gradients or engine.is_gradient_accumulation_boundary()

    def _reduce_rest(self, reduces):
        """Reduces what is left to reduce and, at the end of a step's last backward, hands everything over."""
        try:
            self._reducer.finish_backward(reduces)
        except BaseException:
            self._abandon_backward()
            raise
        if reduces and self._engine().is_gradient_accumulation_boundary():
            self.hand_over()

    def _abandon_unfinished_backward(self):
        """Abandons a backward that raised, and whose graph task a thread of the device still holds, or that was
        interrupted behind its last gradient.
        """
        if self._progress.unfinished:
            logger.warning("The backward before did not come to its end; its gradients are dropped")
            self._abandon_backward()

    def _abandon_backward(self):
        # First, so that its watch, which a thread of the device may drop at any moment, does not come here too.
        self._progress.abandon()
        self._reducer.abandon_backward()
        self.release_gradients()
        # The epilogue that would have left the backward, and stopped its timers, did not run.
        self._backward_active_depth = 0
        engine = self._engine()
        timers = engine.engine_timers
        for name in timers.backward_timers + timers.backward_inner_timers + timers.backward_reduce_timers:
            engine.timers(name).reset()


@functools.cache
def _with_step_local_gradients(cls):
    return type(f"StepLocal{cls.__name__}", (StepLocalGradients, cls), {"plain_class": cls})


def attach(optimizer, engine, reducer, limit):
    """Lets ``optimizer`` take its gradients from ``reducer``, and tell ``limit`` what ranks agree on in a step."""
    optimizer._engine = weakref.ref(engine)
    optimizer._reducer = reducer
    optimizer._gather = AllGather(optimizer)
    optimizer._progress = StepProgress(engine, held_by_threads=not optimizer.bit16_groups_flat[0].is_cpu)
    optimizer._half_step = HalfStep()
    optimizer._around_forward = None
    optimizer._taken_over = False
    optimizer._limit = limit
    optimizer._undo = []
    optimizer._norms_exactly = False
    optimizer._states_on_host = []
    optimizer._registered = registered_parameters(optimizer)
    optimizer._view_specs = [partition_view_specs(optimizer, group) for group in range(len(optimizer.bit16_groups))]
    reference = weakref.ref(optimizer)

    def begin_unannounced_backward():
        attached = reference()
        if isinstance(attached, StepLocalGradients):
            # DeepSpeed announces only the first backward through the outputs of a forward.
            attached._engine()._backward_prologue()

    reducer.on_unannounced_backward(begin_unannounced_backward)
    # Their work is the reducer's now, and so is their memory.
    while optimizer._grad_acc_hooks:
        optimizer._grad_acc_hooks.pop().remove()
    optimizer.contiguous_gradients = False
    keep_no_graph(optimizer)
    optimizer.__class__ = _with_step_local_gradients(type(optimizer))
    _attached.add(optimizer)


def keep_no_graph(optimizer):
    """Detaches the views of parameters that the base keeps for ``safe_get_full_*``.

    Their graph holds the parameters' accumulation nodes, which autograd runs on the stream where they were made: on
    that of ``deepspeed.initialize()``, whatever stream the model is trained on.
    """
    for group in optimizer.bit16_groups:
        for parameter in group:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                mapping.lp_fragment = mapping.lp_fragment.detach()


def take_over_parameters(optimizer):
    """Has earlier engines that train any of these parameters give way: they lie in this optimizer's memory now."""
    own = {id(parameter) for parameter in registered_parameters(optimizer)}
    for earlier in list(_attached):
        if any(id(parameter) in own for parameter in earlier._registered):
            earlier.give_way()
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


def detach(optimizer):
    """Undoes :func:`attach` but for the hooks; for an optimizer that will not train again."""
    optimizer.__class__ = optimizer.plain_class
    _attached.discard(optimizer)
    own = (
        "_around_forward _engine _gather _half_step _limit _norms_exactly _progress _reducer _registered "
        "_states_on_host _taken_over _undo _view_specs"
    )
    for name in own.split():
        delattr(optimizer, name)


def parameters_reduced_by_graphs(optimizer):
    """Lists the parameters whose gradients compiled graphs may reduce: those without a hook on any rank.

    A hook changes which graphs reduce what, and all ranks must reduce in one order.
    """
    registered = registered_parameters(optimizer)
    hooked = torch.tensor([has_hooks(parameter) for parameter in registered], dtype=torch.int32)
    hooked = hooked.to(optimizer.bit16_groups_flat[0].device)
    with collective("find out which parameters have hooks"):
        dist.all_reduce(hooked, op=dist.ReduceOp.MAX, group=optimizer.dp_process_group)
    return [parameter for parameter, flag in zip(registered, hooked.tolist(), strict=True) if not flag]


def has_hooks(parameter):
    """Whether a user's hook wants to see this parameter's gradient, which then has to take autograd's way."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def partition_view_specs(optimizer, group):
    """Lists the runs of this rank's partition: parameters, or parts of them, and the padding between and behind."""
    partition_numel = int(optimizer.partition_size[group])
    start = dist.get_rank(group=optimizer.real_dp_process_group[group]) * partition_numel
    in_partition = {id(parameter) for parameter in optimizer.params_in_partition[group]}
    specs, filled = [], 0
    for parameter, offset in flat_layout(optimizer, group):
        if id(parameter) not in in_partition:
            continue
        first = max(offset - start, 0)
        numel = min(offset + parameter.numel() - start, partition_numel) - first
        if first > filled:
            specs.append(ViewSpec(filled, first - filled, None, is_padding=True))
        specs.append(ViewSpec(first, numel, parameter.shape if numel == parameter.numel() else None))
        filled = first + numel
    if filled < partition_numel:
        specs.append(ViewSpec(filled, partition_numel - filled, None, is_padding=True))
    return specs


def make_reducer(engine, *, overlap, synchronize_before, synchronize_after):
    """Creates the native reducer of an engine, with every parameter registered empty.

    Args:
        engine: a DeepSpeedEngine whose optimizer is the ZeRO-1/2 optimizer.
        overlap: whether a bucket may be on its way while the backward goes on.
        synchronize_before, synchronize_after: whether to drain the device around each bucket.
    """
    optimizer = engine.optimizer
    reducer = reducer_module().Reducer(
        identity=_next_identity(optimizer),
        bucket_numel=int(engine.zero_reduce_bucket_size()),
        overlap=overlap,
        synchronize_before=synchronize_before,
        synchronize_after=synchronize_after,
    )
    for group, process_group in enumerate(optimizer.real_dp_process_group):
        reducer.add_group(
            process_group or dist.get_world_group(),
            int(optimizer.partition_size[group]),
            optimizer.gradient_accumulation_dtype,
            optimizer.bit16_groups_flat[group].device,
            # The step needs a copy in the dtype of the master weights. Where that is the targets' own, they are it.
            optimizer.gradient_accumulation_dtype == optimizer.single_partition_of_fp32_groups[group].dtype,
        )
        for parameter, offset in flat_layout(optimizer, group):
            reducer.register_parameter(
                group, engine.param_names[parameter], parameter, optimizer.get_param_comm_dtype(parameter), offset
            )
    return reducer


def _next_identity(optimizer):
    """Returns a number that no other engine of this process has and that is the same on every rank.

    Engines may share a process group, which matches messages by their order alone.
    """
    global _last_identity
    identity = torch.tensor([_last_identity + 1], dtype=torch.int64, device=optimizer.bit16_groups_flat[0].device)
    with collective("give the engine its number"):
        dist.all_reduce(identity, op=dist.ReduceOp.MAX, group=optimizer.dp_process_group)
    _last_identity = int(identity)
    return _last_identity


def gradient_counters(engine):
    """Returns what an engine's reducer holds on this rank, as a dict of integers.

    Bytes: ``bound`` of gradient targets, ``pending`` of gradients on their way to their owners, ``bucket`` of memory
    allocated for those, ``unreduced`` of gradients kept between the micro-batches of ZeRO-1 or until the last of
    several contributions to a parameter has come, and ``peak_...`` for the highest of each. Counts: ``registered``
    parameters; gradients received ``from_graphs`` that reduce and ``from_autograd``, for code that was not compiled;
    ``buckets_sent``, and ``messages_sent`` in them, each to one owner. Peaks, gradients, buckets and messages count
    since ``reset_gradient_counters()``.

    Raises:
        ValueError: if the engine has not been compiled with DeepCompile ZeRO-1/2.
    """
    return _reducer_of(engine).counters()


def reset_gradient_counters(engine):
    """Makes the peaks of :func:`gradient_counters` start from what is held now, and its other counts from zero."""
    _reducer_of(engine).reset_counters()


def _reducer_of(engine):
    if not isinstance(engine.optimizer, StepLocalGradients):
        raise ValueError(
            "gradient counters need an engine on which engine.compile() has set up DeepCompile ZeRO-1 or "
            "ZeRO-2, and which has not been destroyed"
        )
    return engine.optimizer._reducer
