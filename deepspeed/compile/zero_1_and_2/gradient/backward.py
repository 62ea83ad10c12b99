# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Decides which backwards make up a step, and what remains of the step when a backward raises.

The native reducer knows whether a backward is running: it begins, finishes and abandons backwards under one lock.
:class:`BackwardLife` knows what DeepSpeed and the caller have said of the step: micro-batches, boundaries and regions.
No other code of this fork writes the base's own flags of a backward.
"""

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Callable, List, Optional

import torch

from deepspeed.utils import logger

from ..layout import Layout
from ..messages import warn
from ..parameter.placement import Placement
from .native import Reducer
from .views import PartitionViews

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def in_backward() -> bool:
    """Whether this thread runs a backward, of whichever engine. No public function says so."""
    return torch._C._current_graph_task_id() != -1


@dataclasses.dataclass
class _Step:
    """What this rank knows of the current step. Dropped with the step's gradients."""

    backwards: int = 0  # backwards of the step that have ended
    caller_defines_step: bool = False  # whether the caller decides which backwards belong to the step
    has_unannounced: bool = False  # whether gradients came outside of the engine's backwards since it last reduced
    forward_since_hand_over: bool = False
    by_earlier_region: bool = False  # whether a region of coalesce_grad_reduction() has ended


class BackwardLife:
    """Tracks the backwards of an engine's current step, and decides what remains of the step when a backward raises.

    If DeepSpeed counts micro-batches, a step that lost a backward restarts by itself: the next micro-batch is the
    first of a step. If the caller decides which backwards belong to a step (``no_sync()``,
    ``coalesce_grad_reduction()``, ``set_gradient_accumulation_boundary()``), only the caller knows which micro-batches
    must run again. Then the step raises an error.

    As in DeepSpeed, one thread at a time uses an engine. When a backward raises, only the reducer learns of it, in the
    thread of autograd that drops the backward's graph. This object asks the reducer whenever the engine is called.
    """

    def __init__(self, engine: "DeepSpeedEngine", reducer: Reducer, placement: Placement, layouts: List[Layout]):
        optimizer = engine.optimizer
        self._engine = weakref.ref(engine)
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        self._placement = placement
        self._view_specs = [layout.view_specs() for layout in layouts]
        self._step = _Step()
        # The views in `averaged_gradients`, by parameter group. Empty between steps.
        self._handed_over: List[PartitionViews] = []
        self._lost = 0  # backwards of the step that were dropped because a later one raised
        self._restarts_at: Optional[int] = None  # the value to which the next backward resets `engine.micro_steps`
        # Whether a backward has begun in the current region, the scope of engine.coalesce_grad_reduction().
        self._in_region = False
        self._has_warned = self._has_warned_of_drop = False
        # The reducer may outlive this object, and must not keep it alive.
        begin = weakref.WeakMethod(self.begin_unannounced)
        reducer.listen(lambda: (call := begin()) is not None and call())

    @property
    def _is_complete(self):
        """Whether the optimizer has the gradients of the step."""
        averaged = self._optimizer().averaged_gradients
        return bool(self._handed_over) and any(views is not None for views in averaged.values())

    # A backward, in the order of the calls -----------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Called before a forward for which gradients are enabled."""
        # The next `loss.backward()` starts DeepSpeed's timers before begin(), so the timers of a backward that raised
        # must have been reset.
        self.settle()
        self._step.forward_since_hand_over = True

    def enter(self, base_enter: Callable[[], None]) -> None:
        """Called for each output through which autograd enters a backward, in place of the base's ``enter_backward``.

        A backward of several outputs enters once for each output, but leaves once. So only the first entry counts.
        """
        optimizer = self._optimizer()
        if optimizer._backward_active_depth == 0:
            # The previous backward's callback already ran. DeepSpeed clears this flag only in a forward.
            optimizer._backward_hook_state.post_backward_callback_queued = False
            base_enter()

    def begin_unannounced(self) -> bool:
        """Called when a gradient arrives and no backward has begun. Returns whether the gradient begins one.

        The backward of a penalty on parameters, for example, passes through no output of the engine. Unless the caller
        has called ``engine.backward()``, the reducer keeps the gradients. They belong to the next backward of the
        engine, as without DeepCompile, or to the step if no backward follows.
        """
        engine = self._engine()
        if engine._running_engine_backward:
            engine._backward_prologue()
            return self._reducer.in_backward
        self.settle()
        self._step.has_unannounced = True
        return False

    def begin(self, base_prologue: Callable[[], None]) -> None:
        """Called before the first gradient of a backward, in place of the base's ``backward_prologue``, and once more
        for each further loss of the same backward."""
        engine = self._engine()
        # Within engine.backward(), another graph task belongs to the same backward: checkpointing with
        # use_reentrant=True runs one for each output that it recomputes.
        if engine._running_engine_backward:
            self.settle()
        else:
            self.abandon_unfinished(may_enclose=True)
        base_prologue()
        self._join_step()
        self._reducer.begin_backward(self._reduces())

    def finish(self) -> None:
        """Called after every backward: reduces what no graph reduced, and hands over if the step is complete."""
        if not self._reducer.in_backward:
            # No gradient has announced this backward: its loss needs no output of the engine. On other ranks,
            # the loss may need one.
            self.settle()
            self._join_step()
        self._reduce_rest(self._reduces())
        self._step.backwards += 1

    def end_region(self) -> None:
        """Called at the end of a region: reduces the gradients that the region's backwards kept on this rank.

        An engine whose ``compile()`` failed also makes this call at the end of each backward. The call does nothing
        then, because :meth:`finish` follows.
        """
        if not self._in_region and self._optimizer()._backward_active_depth:
            return
        try:
            self.abandon_unfinished()
            if self._step.backwards:
                self._reduce_rest(True)
        finally:
            self._in_region, self._step.by_earlier_region = False, True

    # A step ------------------------------------------------------------------------------------------------------

    def require_complete(self) -> None:
        """Called before a step: checks that the optimizer has all gradients of the step.

        Raises:
            RuntimeError: if gradients of the step were dropped, or if the step has none.
        """
        self.abandon_unfinished()
        lost = self._lost
        if lost:
            self.drop_step()
            self.begin_anew()
            raise RuntimeError(
                f"gradients of {lost} backwards that belong to this step were dropped when a later one raised, so the "
                "step was not taken; call engine.optimizer.zero_grad() and run all of its micro-batches again"
            )
        if self._step.has_unannounced:
            self._reduce_rest(True)
        if not self._is_complete:
            # Those of its earlier micro-batches too: they would be added to the next step.
            self.drop_step()
            self.begin_anew()
            raise RuntimeError(
                "optimizer.step() found no gradients of the last micro-batch: run all of the step's micro-batches "
                "again, each with a backward (step(), zero_grad() and a backward that raised drop gradients; and a "
                "loss.backward() that leads to no parameter of the engine is none of its backwards, but "
                "engine.backward(loss) is)"
            )

    def refuse_to_drop_within(self) -> None:
        """Called before the caller drops gradients.

        Raises:
            RuntimeError: in a hook of a backward of this engine. A part of each gradient may have been sent by then.
        """
        if self._reducer.in_backward and in_backward():
            raise RuntimeError(
                "zero_grad() was called by a hook while a backward ran, when some of its gradients were on their way "
                "to other ranks; call it when the backward has ended"
            )
        self.abandon_unfinished()

    def read_entries(self) -> None:
        """Makes the step use the tensors that the caller has put into ``averaged_gradients`` or into one of its lists.

        Raises:
            ValueError: if the step cannot read them.
        """
        averaged = self._optimizer().averaged_gradients
        for group, views in enumerate(self._handed_over):
            views.read(averaged.get(group), f"averaged_gradients[{group}]")
            averaged[group] = views

    def take_views(self, group: int) -> PartitionViews:
        """Takes the gradients of a partition out of ``averaged_gradients``, for the step, which drops them."""
        averaged = self._optimizer().averaged_gradients
        views, averaged[group] = averaged[group], None
        return views

    def begin_anew(self) -> None:
        """Resets DeepSpeed's count of micro-batches, so that the next micro-batch is the first of a step."""
        engine = self._engine()
        self._restarts_at = engine.micro_steps - engine.micro_steps % engine.gradient_accumulation_steps()
        engine.micro_steps = self._restarts_at

    def drop_by_caller(self) -> None:
        """Called when the caller drops gradients. Warns once where DeepSpeed without DeepCompile keeps them."""
        step = self._step
        # In ZeRO-1 parameters hold the gradients, and lose them there too.
        keeps = self._optimizer().partition_gradients and step.backwards and not self._is_complete
        if keeps and not step.caller_defines_step and not self._has_warned_of_drop:
            self._has_warned_of_drop = True
            warn(
                "zero_grad() between the micro-batches of a step has dropped the gradients of those before, which "
                "DeepSpeed without DeepCompile keeps; call it before the first micro-batch of a step, or not at all"
            )
        self.drop_step()

    def drop_step(self) -> None:
        """Drops every gradient of the step, and forgets which of its backwards were dropped before."""
        self.settle()
        self._lost = 0
        self.release()

    def release(self) -> None:
        """Drops every gradient that this rank holds, reduced or not."""
        self._release_handed_over()
        self._reducer.release(None)

    def _release_handed_over(self):
        self._step = _Step()
        optimizer = self._optimizer()
        averaged = optimizer.averaged_gradients
        # The caller may have replaced these lists in `averaged_gradients`.
        while self._handed_over:
            self._handed_over.pop().release_grad_buffers()
        for group in averaged:
            averaged[group] = None
            self._placement.hand_over(optimizer, group, None)

    # A backward that raised --------------------------------------------------------------------------------------

    def abandon_unfinished(self, may_enclose: bool = False) -> None:
        """Abandons the last backward if its epilogue has not run and will not.

        Either the backward raised and autograd's device thread still holds its graph task, or the backward was
        interrupted after its last gradient. ``may_enclose``: whether a backward begins that the last one may enclose.
        """
        self._settle(self._reducer.abandon_unfinished(may_enclose))

    def settle(self) -> None:
        """Resets DeepSpeed's counts, flags and timers if the reducer has abandoned a backward since the last call.

        The reducer has then dropped all gradients, also those that it had handed over.
        """
        self._settle(self._reducer.abandoned())

    def _settle(self, how):
        if how is None:
            return
        step = self._step
        self._release_handed_over()
        if step.caller_defines_step:
            self._lost += step.backwards
        else:
            self.begin_anew()
        what = "A backward raised" if how == "raised" else "The previous backward did not finish"
        if step.backwards and not step.caller_defines_step:
            logger.warning(
                f"{what}; the gradients of the {step.backwards} backwards before it, which belong to the same "
                "step, are dropped too, and the next micro-batch is the first of a step"
            )
        elif how != "raised":
            logger.warning(f"{what}, so its gradients are dropped")
        # The base's epilogue did not run, so leave the backward and reset its timers here.
        self._optimizer()._backward_active_depth = 0
        engine = self._engine()
        timers = engine.engine_timers
        for name in timers.backward_timers + timers.backward_inner_timers + timers.backward_reduce_timers:
            engine.timers(name).reset()

    # -------------------------------------------------------------------------------------------------------------

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
            self.drop_step()
            self._reducer.replace_gradients()
        elif self._replaces_gradients():
            # The gradients that the reducer keeps came after the step's gradients, so they belong to the new step.
            self._release_handed_over()
            self._reducer.replace_gradients()
        if self._restarts_at is not None:
            # After a backward that raised, the caller may have called engine.step(), which counted a micro-batch:
            # reset the count.
            engine.micro_steps, self._restarts_at = self._restarts_at, None
        if engine._is_gradient_accumulation_boundary is not None or engine.inside_no_sync_ctxt:
            self._step.caller_defines_step = True

    def _restarts_region(self):
        """Whether the backward that begins is the first of a second region in one step.

        A region contains all backwards of its step, so a second region restarts the step.
        """
        if not self._optimizer()._coalesce_grad_reduction or self._in_region:
            return False
        self._in_region = True
        return self._step.by_earlier_region

    def _replaces_gradients(self):
        """Whether the backward that begins replaces the step's gradients instead of adding to them.

        As in DeepSpeed without DeepCompile, a backward at the accumulation boundary replaces gradients that no step
        has used. But several backwards add up if all their forwards began before the first of the backwards.
        """
        is_further = self._reducer.in_backward  # one of several losses of a backward
        replaces = not is_further and self._is_complete and self._step.forward_since_hand_over
        if replaces and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A backward at the gradient accumulation boundary replaces the previous backward's gradients, which "
                "no engine.step() has used, as in DeepSpeed without DeepCompile; to have several backwards in one "
                "step, use engine.coalesce_grad_reduction() or engine.set_gradient_accumulation_boundary()"
            )
        return replaces

    def _reduce_rest(self, reduces):
        """Reduces what no graph reduced, and hands the bound targets over if the step is complete."""
        try:
            completes = reduces and self._engine().is_gradient_accumulation_boundary()
            handed_over = self._reducer.finish_backward(reduces, completes)
            if reduces:
                self._step.has_unannounced = False
            if completes:
                self._hand_over(handed_over)
        except BaseException:
            # Also on an interrupt: otherwise the next backward would add to the bound targets.
            self._reducer.abandon_backward()
            self.settle()
            raise

    def _hand_over(self, handed_over):
        """Puts views of the bound targets into the optimizer's ``averaged_gradients``."""
        optimizer = self._optimizer()
        with torch.profiler.record_function("deepcompile::hand_over"):
            self._handed_over = []
            for group, targets in enumerate(handed_over):
                # Keep the dict and set its entries: parameters hold a reference to the dict for safe_get_full_grad().
                padding = optimizer.bit16_groups_flat[group].new_empty(0, dtype=optimizer.gradient_accumulation_dtype)
                optimizer.averaged_gradients[group] = views = PartitionViews(
                    targets,
                    self._view_specs[group],
                    padding.cpu() if self._placement.on_host else padding,
                    functools.partial(_release, weakref.ref(self._reducer), group),
                    is_fixed=self._placement.on_host,
                )
                self._handed_over.append(views)
                self._placement.hand_over(optimizer, group, views)
        self._step.forward_since_hand_over = False


def _release(reducer, group):
    # Weak, because parameters hold the views, and the reducer holds parameters where Python's collector sees no cycle.
    if (living := reducer()) is not None:
        living.release(group)
