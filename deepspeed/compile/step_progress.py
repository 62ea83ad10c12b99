# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which backwards make up the optimizer step that is under way, and what becomes of it when one of them raises."""

import weakref

from deepspeed.utils import logger


class StepProgress:
    """Counts the backwards of a step.

    Where DeepSpeed counts micro-batches, a step that lost one begins anew by itself. Where the caller says what
    belongs to a step (``no_sync()``, ``coalesce_grad_reduction()``, ``set_gradient_accumulation_boundary()``), only
    the caller knows what has to come again, and the step has to raise.

    Args:
        engine: the DeepSpeedEngine whose steps these are.
        held_by_threads: whether a backward that raised may be held by a device's thread for a moment.

    Attributes:
        serial: differs between backwards, also where one was abandoned and none has begun since.
        finished: how many backwards of the step have come to their end.
        in_block: whether a backward has begun within a ``coalesce_grad_reduction()`` that goes on.
    """

    def __init__(self, engine, held_by_threads):
        self._engine = weakref.ref(engine)
        self._held_by_threads = held_by_threads
        self.serial = 0
        # The graph task of the backward that has begun and was neither finished nor abandoned.
        self._graph_task = None
        self._graph_ended = False
        self._lost = 0
        self._restarts_at = None
        self._has_warned = False
        self.in_block = False
        self.forget()

    @property
    def unfinished(self):
        """Whether a backward has begun and was neither finished nor abandoned."""
        return self._graph_task is not None

    def left_behind(self, graph_task, in_same_call=False):
        """Whether a backward other than this graph task's has begun and will not come to its end.

        ``in_same_call``: whether this one is within an ``engine.backward()``, which runs several where outputs are
        computed again in it, and comes to its end once. It has begun with asking this.
        """
        if self._graph_task in (None, graph_task) or in_same_call:
            return False
        # Where threads may hold it, one that runs around this one is not told from one that raised.
        return self._graph_ended or self._held_by_threads

    def begin(self, graph_task):
        """A backward begins. Returns its serial."""
        self.serial += 1
        self._graph_task, self._graph_ended = graph_task, False
        engine = self._engine()
        if engine._is_gradient_accumulation_boundary is not None or engine.inside_no_sync_ctxt:
            self._told_by_caller = True
        return self.serial

    def graph_ended(self):
        """Autograd is through with the backward's graph, which is not the end of the backward yet."""
        self._graph_ended = True

    def finish(self):
        """The backward has come to its end."""
        self._graph_task = None
        self.finished += 1

    def abandon(self):
        """The backward raised. With its gradients go those of the step's earlier backwards."""
        self.serial += 1
        self._graph_task = None
        if self._told_by_caller:
            self._lost += self.finished
            return
        self.begin_anew()
        if self.finished:
            logger.warning(
                f"A backward raised; the gradients of the {self.finished} backwards before it, which belong to the "
                "same step, are dropped too, and the next micro-batch is the first of a step"
            )

    def begin_anew(self):
        """The next micro-batch is the first of a step, where DeepSpeed counts them."""
        engine = self._engine()
        self._restarts_at = engine.micro_steps - engine.micro_steps % engine.gradient_accumulation_steps()
        engine.micro_steps = self._restarts_at

    def hand_over(self):
        """The step's gradients are complete: a backward at the accumulation boundary has come to its end."""
        self._complete, self._forward_since = True, False

    def forward_begins(self):
        """A forward whose backward may come begins."""
        self._forward_since = True

    def replaces_gradients(self):
        """Called before each backward. Whether it begins a step anew, because the caller left out the step before.

        DeepSpeed without DeepCompile has a backward at the boundary replace what no step has used, whatever it is of.
        Backwards of forwards that had all begun before the first of them belong together, and add up.
        """
        replaces = self._complete and self._forward_since and self._graph_task is None
        if replaces and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A backward at the gradient accumulation boundary replaces the gradients of the one before, which no "
                "engine.step() has used, as in DeepSpeed without DeepCompile; to have several backwards in one step, "
                "use engine.coalesce_grad_reduction() or engine.set_gradient_accumulation_boundary()"
            )
        return replaces

    def restart_count(self):
        """Called before a backward. Behind one that raised ``engine.step()`` may have been called, and counted."""
        if self._restarts_at is not None:
            self._engine().micro_steps, self._restarts_at = self._restarts_at, None

    def enter_block(self):
        """Called before each backward within ``coalesce_grad_reduction()``, which is to have all those of a step.

        Returns whether an earlier block has left something, which is dropped now: the caller has begun anew.
        """
        began, self.in_block = not self.in_block, True
        if not (began and self._left_block):
            return False
        self._lost = 0
        return True

    def leave_block(self):
        self.in_block, self._left_block = False, True

    def take_lost(self):
        """Returns how many backwards a step lacks because a later one raised, and forgets them."""
        lost, self._lost = self._lost, 0
        return lost

    def forget(self):
        """The step's gradients were released."""
        self.finished = 0
        self._complete = self._forward_since = False
        self._told_by_caller = False
        self._left_block = False
