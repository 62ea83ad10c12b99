# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The life of a backward, and of the step to which the backward belongs.

:class:`BackwardLife` owns this state for one engine. No other code of this fork writes the base's own flags of a
backward. A step is in one :class:`Phase` at a time, and ``TRANSITIONS`` says which event leads from which phase to
which. ``docs/life_of_a_gradient.md`` draws the transitions.
"""

import dataclasses
import enum
import functools
import weakref
from typing import TYPE_CHECKING, Callable, List, Optional

import torch

from deepspeed.utils import logger

from .layout import PartitionViews, view_specs
from .native import Reducer

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class Phase(enum.Enum):
    """How far a step has come."""

    EMPTY = "no gradient of the step is held"
    RUNNING = "autograd runs the graph of a backward"
    ENDING = "autograd is through with the graph, but the backward's epilogue has not run"
    ACCUMULATING = "backwards have ended, and the step waits for more"
    COMPLETE = "the optimizer has the step's gradients"


class Event(enum.Enum):
    """What moves a step from one phase to another."""

    BEGIN = "a backward begins"
    GRAPH_ENDED = "autograd is through with the graph of the backward"
    FINISH = "the epilogue of a backward has run"
    HAND_OVER = "the optimizer gets the gradients"
    ABANDON = "a backward raised, or was interrupted"
    RELEASE = "the gradients are dropped: by step(), zero_grad() or a loaded checkpoint"


_BETWEEN = (Phase.EMPTY, Phase.ACCUMULATING, Phase.COMPLETE)
_WITHIN = (Phase.RUNNING, Phase.ENDING)

# event -> phase before -> phase after. A pair that is not listed cannot occur.
TRANSITIONS = {
    # Also within a backward: one engine.backward() may have several losses, or recompute outputs (checkpointing).
    Event.BEGIN: dict.fromkeys(Phase, Phase.RUNNING),
    Event.GRAPH_ENDED: dict.fromkeys(_WITHIN, Phase.ENDING),
    # Also between backwards: the backward of a loss without parameters has an epilogue, but no gradient begins it.
    Event.FINISH: dict.fromkeys(Phase, Phase.ACCUMULATING),
    Event.HAND_OVER: dict.fromkeys((Phase.ACCUMULATING, Phase.COMPLETE), Phase.COMPLETE),
    Event.ABANDON: dict.fromkeys(Phase, Phase.EMPTY),
    # The caller may destroy the engine within a backward. The backward goes on.
    Event.RELEASE: {**dict.fromkeys(_BETWEEN, Phase.EMPTY), **{phase: phase for phase in _WITHIN}},
}


@dataclasses.dataclass
class _Step:
    """What to know of a step besides its phase. Dropped with the gradients of the step."""

    backwards: int = 0  # that have ended
    told_by_caller: bool = False  # whether the caller decides which backwards belong to the step
    micro_step: Optional[int] = None  # `engine.micro_steps` when the last backward was announced
    keeps: bool = False  # whether this rank keeps gradients that came while no backward of the engine ran
    forward_since_hand_over: bool = False
    by_earlier_region: bool = False  # whether a region of coalesce_grad_reduction() that has ended left gradients


class BackwardLife:
    """Tracks the backwards of an engine's current step, and decides what remains of the step when a backward raises.

    If DeepSpeed counts micro-batches, a step that lost a backward restarts by itself: the next micro-batch is the
    first of a step. If the caller decides which backwards belong to a step (``no_sync()``,
    ``coalesce_grad_reduction()``, ``set_gradient_accumulation_boundary()``), only the caller knows which micro-batches
    must run again. Then the step raises an error.

    Args:
        engine: the DeepSpeedEngine. Its optimizer is the ZeRO-1/2 optimizer.
        reducer: the engine's native reducer.
    """

    def __init__(self, engine: "DeepSpeedEngine", reducer: Reducer):
        optimizer = engine.optimizer
        self._engine = weakref.ref(engine)
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        self._view_specs = [view_specs(optimizer, group) for group in range(len(optimizer.bit16_groups))]
        # On an accelerator, autograd's device thread may for a moment hold the graph task of a backward that raised.
        self._held_by_threads = not optimizer.bit16_groups_flat[0].is_cpu
        self.phase = Phase.EMPTY
        # The id of the running backward's autograd graph task.
        self._graph_task: Optional[int] = None
        # Changes when a backward begins or is abandoned, so that watches of earlier backwards know they are outdated.
        self._serial = 0
        self._step = _Step()
        # How many of the step's backwards were dropped because a later one raised, and the value to which the next
        # backward resets `engine.micro_steps`.
        self._lost = 0
        self._restarts_at: Optional[int] = None
        # A region is the scope of engine.coalesce_grad_reduction(). Whether a backward has begun in the current one.
        self._in_region = False
        self._has_warned = False

    def _advance(self, event):
        if self.phase not in TRANSITIONS[event]:
            raise RuntimeError(f"a step in phase {self.phase.name} cannot be moved by {event.name}")
        self.phase = TRANSITIONS[event][self.phase]

    @property
    def _runs(self):
        return self.phase in _WITHIN

    # A backward, in the order of the calls -----------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Called before a forward for which gradients are enabled."""
        self._step.forward_since_hand_over = True

    def enter(self, enter_backward: Callable[[], None]) -> None:
        """Called for each output through which autograd enters a backward.

        A backward of several outputs enters once for each output, but leaves only once. So only the first entry
        counts.

        Args:
            enter_backward: the base optimizer's own ``enter_backward``.
        """
        optimizer = self._optimizer()
        if optimizer._backward_active_depth == 0:
            # The previous backward's callback already ran. DeepSpeed clears this flag only in a forward.
            optimizer._backward_hook_state.post_backward_callback_queued = False
            enter_backward()

    def begin_unannounced(self) -> bool:
        """Called when a gradient arrives and no backward has begun. Returns whether the gradient begins one.

        DeepSpeed announces only the first backward through the outputs of a forward, so a further one begins here.
        Before the first one, a backward does not come through an output of the engine, like the backward of a penalty
        on parameters. The reducer keeps the gradients of such a backward. They belong to the next backward of the
        engine, as without DeepCompile, or to the step if no backward follows.
        """
        engine, optimizer = self._engine(), self._optimizer()
        was_announced = (
            optimizer._backward_hook_state.backward_seen_this_step and self._step.micro_step == engine.micro_steps
        )
        if engine._running_engine_backward or was_announced:
            engine._backward_prologue()
            return True
        self._step.keeps = True
        return False

    def begin(self, base_prologue: Callable[[], None], hooked: List[int]) -> None:
        """Called before the first gradient of a backward, and once more for each further loss of the same backward.

        Args:
            base_prologue: the base optimizer's own ``backward_prologue``.
            hooked: indices, in the reducer's order, of parameters whose gradients a user's hook wants to see.
        """
        engine = self._engine()
        graph_task = torch._C._current_graph_task_id()
        # Within engine.backward(), another graph task belongs to the same backward: checkpointing with
        # use_reentrant=True runs one for each output that it recomputes.
        if graph_task != self._graph_task and not engine._running_engine_backward:
            self.abandon_interrupted()
        self._join_step()
        self._step.micro_step = engine.micro_steps
        base_prologue()
        self._reducer.begin_backward(self._reduces(), hooked)
        self._advance(Event.BEGIN)
        self._graph_task = graph_task
        self._serial += 1
        if graph_task != -1:
            torch.autograd.Variable._execution_engine.queue_callback(_Watch(self, self._serial))

    def finish(self) -> None:
        """Called after every backward: reduces what no graph reduced, and hands over if the step is complete."""
        if not self._runs:
            # No gradient has announced this backward: its loss needs no output of the engine. On other ranks,
            # the loss may need one.
            self._join_step()
        self._reduce_rest(self._reduces())
        self._graph_task = None
        self._step.backwards += 1
        self._advance(Event.FINISH)
        self._complete_if_handed_over()

    def _complete_if_handed_over(self):
        optimizer = self._optimizer()
        # Also if an earlier backward of the step handed gradients over and this one only kept its own.
        if any(views is not None for views in optimizer.averaged_gradients.values()):
            if optimizer.cpu_offload:
                # This backward may have added to gradients in host memory, which the optimizer reads without a stream.
                self._reducer.use_targets_here()
            self._advance(Event.HAND_OVER)

    def end_region(self) -> None:
        """Called at the end of a region: reduces the gradients that the region's backwards kept on this rank."""
        try:
            self.abandon_unfinished()
            if self._step.backwards:
                self._reduce_rest(True)
                self._complete_if_handed_over()
        finally:
            self._in_region, self._step.by_earlier_region = False, True

    # A step ------------------------------------------------------------------------------------------------------

    def require_complete(self) -> None:
        """Called before a step: checks that the optimizer has all gradients of the step.

        Raises:
            RuntimeError: if gradients of the step were dropped, or if the step has none.
        """
        self.abandon_unfinished()
        lost = self.forget_lost()
        if lost:
            self.release()
            self.begin_anew()
            raise RuntimeError(
                f"gradients of {lost} backwards that belong to this step were dropped when a later one raised, so the "
                "step was not taken; call engine.optimizer.zero_grad() and run all of its micro-batches again"
            )
        if self.phase is not Phase.COMPLETE and self._step.keeps:
            self._reduce_rest(True)
            self._advance(Event.FINISH)
            self._complete_if_handed_over()
        if self.phase is not Phase.COMPLETE:
            self.begin_anew()
            raise RuntimeError(
                "optimizer.step() found no gradients: run a backward at the gradient accumulation "
                "boundary first (they are dropped by step(), zero_grad() and a backward that raised)"
            )

    def refuse_to_drop_within(self) -> None:
        """Called before the caller drops gradients.

        Raises:
            RuntimeError: in a hook of a backward of this engine. A part of each gradient may have been sent by then.
        """
        if self._runs and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "zero_grad() was called by a hook while a backward ran, when some of its gradients were on their way "
                "to other ranks; call it when the backward has ended"
            )
        self.abandon_unfinished()

    def begin_anew(self) -> None:
        """Resets DeepSpeed's count of micro-batches, so that the next micro-batch is the first of a step."""
        engine = self._engine()
        self._restarts_at = engine.micro_steps - engine.micro_steps % engine.gradient_accumulation_steps()
        engine.micro_steps = self._restarts_at

    def forget_lost(self) -> int:
        """Returns how many of the step's backwards were dropped because a later one raised, and resets the number."""
        lost, self._lost = self._lost, 0
        return lost

    def close(self) -> None:
        """Called when the engine is destroyed or gives way: drops all gradients, and ignores watches from now on."""
        self._serial += 1
        self.release()

    def release(self) -> None:
        """Drops every gradient that this rank holds, reduced or not."""
        self._release_handed_over()
        self._reducer.release_all()

    def _release_handed_over(self):
        self._advance(Event.RELEASE)
        self._step = _Step()
        optimizer = self._optimizer()
        averaged = optimizer.averaged_gradients
        for group, views in list(averaged.items()):
            if isinstance(views, PartitionViews):
                views.release_grad_buffers()
            averaged[group] = None
            if optimizer.cpu_offload:
                optimizer.offload_gradient_dict[group] = None

    # A backward that raised --------------------------------------------------------------------------------------

    def abandon_interrupted(self) -> None:
        """Called when a backward begins: abandons an earlier backward that raised or was interrupted."""
        # In ENDING, the earlier backward's graph has ended, so that backward does not enclose the new one. In RUNNING
        # on CUDA, we cannot tell an enclosing backward from one that raised.
        if self.phase is Phase.ENDING or (self._runs and self._held_by_threads):
            self.abandon_unfinished()

    def abandon_unfinished(self) -> None:
        """Called between backwards: abandons the last backward if its epilogue has not run.

        Either the backward raised and autograd's device thread still holds its graph task, or the backward was
        interrupted after its last gradient.
        """
        if self._runs:
            logger.warning("The previous backward did not finish, so its gradients are dropped")
            self.abandon()

    def abandon(self) -> None:
        """Drops the gradients of a backward that raised, and those of the step's earlier backwards."""
        # Change the serial first: autograd's device thread may drop the watch at any moment, and the watch must not
        # abandon the backward a second time.
        self._serial += 1
        self._graph_task = None
        self._advance(Event.ABANDON)
        before = self._step.backwards
        if self._step.told_by_caller:
            self._lost += before
        else:
            self.begin_anew()
            if before:
                logger.warning(
                    f"A backward raised; the gradients of the {before} backwards before it, which belong to "
                    "the same step, are dropped too, and the next micro-batch is the first of a step"
                )
        self._reducer.abandon_backward()
        self.release()
        # The base's epilogue did not run, so leave the backward and reset its timers here.
        self._optimizer()._backward_active_depth = 0
        engine = self._engine()
        timers = engine.engine_timers
        for name in timers.backward_timers + timers.backward_inner_timers + timers.backward_reduce_timers:
            engine.timers(name).reset()

    def graph_ended(self) -> None:
        """Called when autograd has run the graph of the backward. The backward ends later, with its epilogue."""
        if self._runs:
            self._advance(Event.GRAPH_ENDED)

    def is_current(self, serial: int) -> bool:
        """Whether the backward with this serial is the last that began, and was not abandoned."""
        return self._serial == serial

    # -------------------------------------------------------------------------------------------------------------

    @property
    def in_region(self) -> bool:
        """Whether a backward has begun in the current region of ``coalesce_grad_reduction()``."""
        return self._in_region

    def _reduces(self):
        """Whether the current backward reduces its gradients instead of keeping them on this rank for a later one."""
        engine = self._engine()
        if engine.inside_no_sync_ctxt:
            return False
        return self._optimizer().partition_gradients or engine.is_gradient_accumulation_boundary()

    def _join_step(self):
        """Makes a backward one of the current step, or the first of a new one."""
        engine = self._engine()
        if self._restarts_region():
            self.release()
            self._reducer.replace_gradients()
        elif self._replaces_gradients():
            # What the reducer keeps has come after the step's gradients, so it belongs to the new step.
            self._release_handed_over()
            self._reducer.replace_gradients()
        if self._restarts_at is not None:
            # After a backward that raised, the caller may have called engine.step(), which counted a micro-batch:
            # reset the count.
            engine.micro_steps, self._restarts_at = self._restarts_at, None
        if engine._is_gradient_accumulation_boundary is not None or engine.inside_no_sync_ctxt:
            self._step.told_by_caller = True

    def _restarts_region(self):
        """Whether the backward that begins is the first of a second region in one step.

        One region contains all backwards of a step. With a second region the caller restarts the step.
        """
        if not self._optimizer()._coalesce_grad_reduction or self._in_region:
            return False
        self._in_region = True
        if self._step.by_earlier_region:
            self._lost = 0
        return self._step.by_earlier_region

    def _replaces_gradients(self):
        """Whether the backward that begins replaces the gradients that are held instead of adding to them.

        As in DeepSpeed without DeepCompile, a backward at the accumulation boundary replaces gradients that no step
        has used. But several backwards add up if all their forwards began before the first of the backwards.
        """
        replaces = self.phase is Phase.COMPLETE and self._step.forward_since_hand_over
        if replaces and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A backward at the gradient accumulation boundary replaces the previous backward's gradients, which "
                "no engine.step() has used, as in DeepSpeed without DeepCompile; to have several backwards in one "
                "step, use engine.coalesce_grad_reduction() or engine.set_gradient_accumulation_boundary()"
            )
        return replaces

    def _reduce_rest(self, reduces):
        """Reduces what no graph reduced, and hands over what is bound if the step is complete."""
        try:
            self._reducer.finish_backward(reduces)
            if reduces and self._engine().is_gradient_accumulation_boundary():
                self._reducer.agree()
                self._hand_over()
        except BaseException:
            # Also on an interrupt: the next backward would add to what is bound.
            self.abandon()
            raise

    def _hand_over(self):
        """Puts views of the bound targets into the optimizer's ``averaged_gradients``."""
        optimizer = self._optimizer()
        with torch.profiler.record_function("deepcompile::hand_over"):
            for group, specs in enumerate(self._view_specs):
                # Keep the dict and set its entries: parameters hold a reference to the dict for safe_get_full_grad().
                optimizer.averaged_gradients[group] = views = PartitionViews(
                    self._reducer.targets(group),
                    self._reducer.flat_partition(group),
                    specs,
                    optimizer.bit16_groups_flat[group].new_empty(0, dtype=optimizer.gradient_accumulation_dtype),
                    functools.partial(self._reducer.release, group),
                    stay_on_host=optimizer.cpu_offload,
                )
                if optimizer.cpu_offload:
                    # With offloading, parameters look for their gradients in this dict. It keeps no memory alive,
                    # because the host memory of the gradients stays allocated.
                    optimizer.offload_gradient_dict[group] = views.without_padding()
        self._step.forward_since_hand_over = False


class _Watch:
    """Tells a :class:`BackwardLife` that autograd has run the graph of a backward, or that the backward raised.

    ``BackwardLife.begin()`` queues the watch as a callback of the running autograd graph task. The task calls the
    watch when the graph has run. If the backward raises, the task drops the watch without calling it. No other
    extension point of autograd tells of a backward that raised.
    """

    def __init__(self, life, serial):
        self._life, self._serial = weakref.ref(life), serial
        # A finalizer, because __call__() can detach a finalizer and cannot detach a __del__(). After a backward that
        # did not raise, no Python code may run while the graph task is dropped: a pending KeyboardInterrupt would be
        # raised there, where nobody can catch it.
        self._dropped = weakref.finalize(self, _abandon, self._life, serial)
        self._dropped.atexit = False

    def __call__(self):
        self._dropped.detach()
        life = self._life()
        if life is not None and life.is_current(self._serial):
            life.graph_ended()


def _abandon(reference, serial):
    life = reference()
    if life is not None and life.is_current(serial):
        life.abandon()
