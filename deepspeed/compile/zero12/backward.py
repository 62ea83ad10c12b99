# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The life of a backward, and of the step to which it belongs.

:class:`BackwardLife` owns this state for one engine, and is the only code here that writes the base's own flags of a
backward. A step is in one :class:`Phase` at a time, and ``TRANSITIONS`` says which event leads from which phase to
which; ``docs/life_of_a_gradient.md`` draws it.
"""

import enum
import functools
import weakref
from typing import Callable, List, Optional

import torch

from deepspeed.utils import logger

from .layout import PartitionViews, view_specs


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

# event -> phase before -> phase after. What is not here cannot happen.
TRANSITIONS = {
    # Within a backward too: several losses, or outputs that are computed again, in one engine.backward().
    Event.BEGIN: dict.fromkeys(Phase, Phase.RUNNING),
    Event.GRAPH_ENDED: dict.fromkeys(_WITHIN, Phase.ENDING),
    # Between backwards: a loss without parameters has an epilogue, but no gradient announces its backward.
    Event.FINISH: dict.fromkeys(Phase, Phase.ACCUMULATING),
    Event.HAND_OVER: dict.fromkeys((Phase.ACCUMULATING, Phase.COMPLETE), Phase.COMPLETE),
    Event.ABANDON: dict.fromkeys(Phase, Phase.EMPTY),
    # A hook may call zero_grad() within a backward, which goes on.
    Event.RELEASE: {**dict.fromkeys(_BETWEEN, Phase.EMPTY), **{phase: phase for phase in _WITHIN}},
}


class BackwardLife:
    """Which backwards make up the step of an engine that is under way, and what becomes of it when one raises.

    Where DeepSpeed counts micro-batches, a step that lost one begins anew by itself. Where the caller says what
    belongs to a step (``no_sync()``, ``coalesce_grad_reduction()``, ``set_gradient_accumulation_boundary()``), only
    the caller knows what has to come again, and the step has to raise.

    Args:
        engine: the DeepSpeedEngine. Its optimizer is the ZeRO-1/2 optimizer.
        reducer: the engine's native reducer.
    """

    def __init__(self, engine, reducer):
        optimizer = engine.optimizer
        self._engine = weakref.ref(engine)
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        self._view_specs = [view_specs(optimizer, group) for group in range(len(optimizer.bit16_groups))]
        # A thread of the device may hold a backward that raised for a moment.
        self._held_by_threads = not optimizer.bit16_groups_flat[0].is_cpu
        self.phase = Phase.EMPTY
        # The autograd graph task of the backward that runs. The serial differs between backwards, and an abandoned one
        # has none: watches of earlier backwards know by it that they are out of date.
        self._graph_task: Optional[int] = None
        self._serial = 0
        # Of the step: backwards that ended, and whether the caller said what belongs to it.
        self._finished = 0
        self._told_by_caller = False
        self._forward_since_hand_over = False
        # Backwards that the step lacks because a later one raised, and where DeepSpeed's count begins anew.
        self._lost = 0
        self._restarts_at: Optional[int] = None
        # Of engine.coalesce_grad_reduction(): whether a backward began within one, and whether one left gradients.
        self._in_region = False
        self._region_left_gradients = False
        self._has_warned = False

    def _advance(self, event):
        self.phase = TRANSITIONS[event][self.phase]

    @property
    def _runs(self):
        return self.phase in _WITHIN

    # A backward, in the order of the calls -----------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Called before a forward with gradients."""
        self._forward_since_hand_over = True

    def enter(self, enter_backward: Callable[[], None]) -> None:
        """Called for each output through which autograd enters a backward.

        A backward of several outputs enters for each of them but leaves once, so only the first may be counted.
        """
        optimizer = self._optimizer()
        if optimizer._backward_active_depth == 0:
            # The previous backward's callback already ran. DeepSpeed clears this flag only in a forward.
            optimizer._backward_hook_state.post_backward_callback_queued = False
            enter_backward()

    def begin(self, base_prologue: Callable[[], None], hooked: List[int]) -> None:
        """Called before the first gradient of a backward, and once more for each further loss of the same backward.

        Args:
            base_prologue: the base optimizer's own ``backward_prologue``.
            hooked: indices, in the reducer's order, of parameters whose gradients a user's hook wants to see.
        """
        engine = self._engine()
        graph_task = torch._C._current_graph_task_id()
        # engine.backward() runs several graphs where outputs are computed again in it.
        if graph_task != self._graph_task and not engine._running_engine_backward:
            self.abandon_interrupted()
        if self._begins_step_anew():
            self.release()
        if self._restarts_at is not None:
            # After a backward that raised, the caller may have called engine.step(), which counted a micro-batch.
            engine.micro_steps, self._restarts_at = self._restarts_at, None
        base_prologue()
        self._reducer.begin_backward(self._reduces(), hooked)
        self._advance(Event.BEGIN)
        self._graph_task = graph_task
        self._serial += 1
        if engine._is_gradient_accumulation_boundary is not None or engine.inside_no_sync_ctxt:
            self._told_by_caller = True
        if graph_task != -1:
            torch.autograd.Variable._execution_engine.queue_callback(_Watch(self, self._serial))

    def finish(self) -> None:
        """Called behind every backward: reduces what no graph has reduced, and hands over what completes the step."""
        reduces = self._reduces()
        self._reduce_rest(reduces)
        self._advance(Event.FINISH)
        self._graph_task = None
        self._finished += 1
        if reduces and self._engine().is_gradient_accumulation_boundary():
            self._hand_over()
        elif any(views is not None for views in self._optimizer().averaged_gradients.values()):
            # The optimizer keeps what an earlier backward of the step has handed over.
            self._advance(Event.HAND_OVER)

    def end_region(self) -> None:
        """Called at the end of ``engine.coalesce_grad_reduction()``: reduces what its backwards kept on this rank."""
        try:
            self.abandon_unfinished()
            if self._finished:
                self._reduce_rest(True)
                if self._engine().is_gradient_accumulation_boundary():
                    self._hand_over()
        finally:
            self._in_region, self._region_left_gradients = False, True

    # A step ------------------------------------------------------------------------------------------------------

    def require_complete(self) -> None:
        """Called before a step.

        Raises:
            RuntimeError: if gradients of the step were lost, or none are there.
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
        if self.phase is not Phase.COMPLETE:
            self.begin_anew()
            raise RuntimeError(
                "optimizer.step() found no gradients: run a backward at the gradient accumulation "
                "boundary first (they are dropped by step(), zero_grad() and a backward that raised)"
            )

    def begin_anew(self) -> None:
        """Has the next micro-batch be the first of a step, where DeepSpeed counts them."""
        engine = self._engine()
        self._restarts_at = engine.micro_steps - engine.micro_steps % engine.gradient_accumulation_steps()
        engine.micro_steps = self._restarts_at

    def forget_lost(self) -> int:
        """Returns how many backwards the step lacks because a later one raised, and forgets them."""
        lost, self._lost = self._lost, 0
        return lost

    def release(self) -> None:
        """Drops every gradient that this rank holds, reduced or not."""
        self._advance(Event.RELEASE)
        self._finished = 0
        self._told_by_caller = self._forward_since_hand_over = self._region_left_gradients = False
        averaged = self._optimizer().averaged_gradients
        for group, views in list(averaged.items()):
            if isinstance(views, PartitionViews):
                views.release_grad_buffers()
            averaged[group] = None
        self._reducer.release_all()

    # A backward that raised --------------------------------------------------------------------------------------

    def abandon_interrupted(self) -> None:
        """Called when another backward begins: abandons one that has begun and will not come to its end."""
        # On CUDA we cannot tell an enclosing backward from one that raised.
        if self.phase is Phase.ENDING or (self._runs and self._held_by_threads):
            self.abandon_unfinished()

    def abandon_unfinished(self) -> None:
        """Called between backwards: abandons one that has not come to its end.

        Either it raised, and a thread of the device still holds its graph task, or it was interrupted behind its last
        gradient.
        """
        if self._runs:
            logger.warning("The backward before did not come to its end; its gradients are dropped")
            self.abandon()

    def abandon(self) -> None:
        """Drops a backward that raised, and with its gradients those of the step's earlier backwards."""
        # First, so that the watch, which a thread of the device may drop at any moment, does not come here too.
        self._serial += 1
        self._graph_task = None
        self._advance(Event.ABANDON)
        if self._told_by_caller:
            self._lost += self._finished
        else:
            self.begin_anew()
            if self._finished:
                logger.warning(
                    f"A backward raised; the gradients of the {self._finished} backwards before it, which belong to "
                    "the same step, are dropped too, and the next micro-batch is the first of a step"
                )
        self._reducer.abandon_backward()
        self.release()
        # The base's epilogue, which would have left the backward and stopped its timers, did not run.
        self._optimizer()._backward_active_depth = 0
        engine = self._engine()
        timers = engine.engine_timers
        for name in timers.backward_timers + timers.backward_inner_timers + timers.backward_reduce_timers:
            engine.timers(name).reset()

    def graph_ended(self) -> None:
        """Called when autograd is through with the graph of the backward, which is not the end of the backward yet."""
        if self._runs:
            self._advance(Event.GRAPH_ENDED)

    def is_current(self, serial: int) -> bool:
        """Whether no backward has begun since the one with this serial, and that one was not abandoned."""
        return self._serial == serial

    # -------------------------------------------------------------------------------------------------------------

    @property
    def in_region(self) -> bool:
        """Whether a backward has begun within a ``coalesce_grad_reduction()`` that goes on."""
        return self._in_region

    def _reduces(self):
        """Whether a backward reduces what it computes, and does not keep it on this rank for a later one."""
        engine = self._engine()
        if engine.inside_no_sync_ctxt:
            return False
        return self._optimizer().partition_gradients or engine.is_gradient_accumulation_boundary()

    def _begins_step_anew(self):
        """Whether a backward that begins replaces gradients that are held, and does not add to them."""
        if self._optimizer()._coalesce_grad_reduction and not self._in_region:
            self._in_region = True
            if self._region_left_gradients:
                # A region has all backwards of a step, so the caller has begun the step anew.
                self._lost = 0
                return True
        # DeepSpeed without DeepCompile has a backward at the boundary replace what no step has used. Backwards of
        # forwards that had all begun before the first of these backwards belong together, and add up.
        replaces = self.phase is Phase.COMPLETE and self._forward_since_hand_over
        if replaces and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A backward at the gradient accumulation boundary replaces the gradients of the one before, which no "
                "engine.step() has used, as in DeepSpeed without DeepCompile; to have several backwards in one step, "
                "use engine.coalesce_grad_reduction() or engine.set_gradient_accumulation_boundary()"
            )
        return replaces

    def _reduce_rest(self, reduces):
        try:
            self._reducer.finish_backward(reduces)
        except BaseException:
            self.abandon()
            raise

    def _hand_over(self):
        """Makes what is bound the optimizer's ``averaged_gradients``."""
        optimizer = self._optimizer()
        with torch.profiler.record_function("deepcompile::hand_over"):
            for group, specs in enumerate(self._view_specs):
                # The dict is never replaced: parameters hold a reference to it for safe_get_full_grad().
                optimizer.averaged_gradients[group] = PartitionViews(
                    self._reducer.targets(group),
                    self._reducer.flat_partition(group),
                    specs,
                    optimizer.bit16_groups_flat[group].new_empty(0, dtype=optimizer.gradient_accumulation_dtype),
                    functools.partial(self._reducer.release, group),
                )
        self._advance(Event.HAND_OVER)
        self._forward_since_hand_over = False


class _Watch:
    """Tells a :class:`BackwardLife` when autograd is through with the graph of a backward, or when that raised.

    Queued as a callback of the running autograd graph task. The task calls it at the end of a backward. Where the
    backward raised, the task drops it uncalled; no other extension point of autograd tells of that.
    """

    def __init__(self, life, serial):
        self._life, self._serial = weakref.ref(life), serial
        # Not a __del__: Python code that runs while the graph task is dropped would raise a pending KeyboardInterrupt
        # there, where nobody can catch it. Where the backward did not raise, no code is to run then.
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
