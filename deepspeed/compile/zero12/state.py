# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""All that DeepCompile ZeRO-1/2 keeps of one engine."""

import contextlib
import weakref
from typing import Optional

from .backward import BackwardLife
from .forward import AroundForward
from .gather import AllGather
from .layout import registered_parameters
from .step import InterruptedStep


class Zero12:
    """The state of an engine under DeepCompile ZeRO-1/2. Its optimizer holds it as ``_zero12`` while it is attached.

    Args:
        engine: a DeepSpeedEngine whose optimizer is the ZeRO-1/2 optimizer.
        reducer: the engine's native reducer.
        limit: the engine's ``CompilationLimit``.

    Attributes:
        registered: the optimizer's parameters, in the order in which the reducer numbers them.
        backward: the ``BackwardLife``.
        interrupted_step: what a step leaves that raised while it changed parameters.
        gather: how parameters get their new values after a step.
        around_forward: None, or the context of each forward of the engine.
        undo: what to call when the engine is destroyed, the last addition first.
        taken_over: whether a later engine trains the parameters.
    """

    def __init__(self, engine, reducer, limit):
        self._engine = weakref.ref(engine)
        self.reducer = reducer
        self.limit = limit
        self.registered = registered_parameters(engine.optimizer)
        self.backward = BackwardLife(engine, reducer)
        self.interrupted_step = InterruptedStep()
        self.gather = AllGather(engine.optimizer)
        self.around_forward: Optional[AroundForward] = None
        self.undo = contextlib.ExitStack()
        self.taken_over = False
        # Optimizer states that were on the host when the rest was offloaded: (states of a parameter, name).
        self.states_on_host = []

    @property
    def engine(self):
        """The engine, which is gone where only its optimizer is still held."""
        return self._engine()

    def refuse(self) -> None:
        """Raises RuntimeError where this engine must not train: it was taken over, or a step was interrupted."""
        if self.taken_over:
            raise RuntimeError(
                "a later engine has been compiled for this engine's parameters and trains them now; use that one, and "
                "destroy this one"
            )
        self.interrupted_step.refuse()

    def let_go(self) -> None:
        """Drops gradients, leaves the parameters to whoever comes next, and undoes the engine's compilation."""
        self.backward.release()
        self.interrupted_step.forget()
        self.reducer.close()
        self.around_forward = None
        self.undo.close()
