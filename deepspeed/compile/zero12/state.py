# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The state that DeepCompile ZeRO-1/2 keeps for one engine."""

import contextlib
import weakref
from typing import TYPE_CHECKING, List, Optional

from .backward import BackwardLife
from .gather import AllGather
from .gather_hooks import Waiting
from .interrupted import InterruptedStep
from .layout import registered_parameters
from .native import Reducer
from .sharded_blocks import ShardedBlocks
from .update.muon import Orthogonalizer
from .update.rule import Rule

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from .graph.compilation_limit import CompilationLimit


class Zero12:
    """The state of an engine under DeepCompile ZeRO-1/2. An attached optimizer holds this object as ``_zero12``.

    Args:
        engine: a DeepSpeedEngine whose optimizer is the ZeRO-1/2 optimizer.
        reducer: the engine's native reducer.
        limit: the engine's ``CompilationLimit``.
        waiting: None, or the ``Waiting`` for parameters that are on their way.
        sharded: None, or the ``ShardedBlocks`` with the frozen parameters.
        rules: the rules that step partitions, in the order in which they are asked.
        orthogonalizer: None, or what computes Muon's updates.
        optimizer_states: the format of optimizer states, or None for the optimizer's own.
        monitors_memory: whether monitors get the counters of gradients and the peaks of memory after a step.

    Attributes:
        registered: the registered parameters, in the order in which the reducer numbers them.
        backward: the ``BackwardLife``.
        interrupted_step: refuses to go on after a step that an exception ended while it changed parameters.
        gather: distributes the stepped parameters to all ranks: an ``AllGather`` or an ``OverlappedGather``.
        undo: functions to call when the engine is destroyed, in the reverse of the order in which they were added.
        taken_over: whether a later engine trains the parameters.
    """

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        reducer: Reducer,
        limit: "CompilationLimit",
        waiting: Optional[Waiting],
        sharded: Optional[ShardedBlocks],
        rules: List[Rule],
        orthogonalizer: Optional[Orthogonalizer],
        optimizer_states: Optional[str],
        monitors_memory: bool,
    ):
        self._engine = weakref.ref(engine)
        self.reducer = reducer
        self.limit = limit
        self.registered = registered_parameters(engine.optimizer)
        self.backward = BackwardLife(engine, reducer)
        self.interrupted_step = InterruptedStep()
        self.waiting = waiting
        self.sharded = sharded
        self.gather: AllGather = AllGather(engine.optimizer) if waiting is None else waiting.gather
        self.rules = rules
        self.orthogonalizer = orthogonalizer
        self.optimizer_states = optimizer_states
        self.monitors_memory = monitors_memory
        self.undo = contextlib.ExitStack()
        self.taken_over = False
        # Optimizer states that were already on the host when the others were offloaded: (states of a parameter, name).
        self.states_on_host = []

    @property
    def engine(self) -> Optional["DeepSpeedEngine"]:
        """The engine, or None if only the engine's optimizer still exists."""
        return self._engine()

    def refuse(self) -> None:
        """Raises RuntimeError if this engine must not train: a later engine does, or a step was interrupted."""
        if self.taken_over:
            raise RuntimeError(
                "a later engine has been compiled for this engine's parameters and trains them now; use that one, and "
                "destroy this one"
            )
        self.interrupted_step.refuse()

    def let_go(self) -> None:
        """Drops all gradients, and undoes the setup of the engine."""
        self.backward.release()
        self.interrupted_step.forget()
        self.undo.close()


def state_of(engine: "DeepSpeedEngine") -> Optional[Zero12]:
    """Returns the state of an engine, or None unless the engine is set up for DeepCompile ZeRO-1/2."""
    return getattr(engine.optimizer, "_zero12", None)
