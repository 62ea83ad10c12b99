# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The state that DeepCompile ZeRO-1/2 keeps for one engine."""

import contextlib
import weakref
from typing import TYPE_CHECKING, Collection, Iterator, List, Optional, Type

from ..feature import Feature, Part, Transform, find, only, overriding
from ..gradient.backward import BackwardLife
from ..gradient.native import Reducer
from ..hooks import Hook
from ..layout import Layout
from ..parameter.gather import AllGather
from ..parameter.placement import Placement
from ..step.rule import Rule

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class EngineState:
    """The state of an engine under DeepCompile ZeRO-1/2. An attached optimizer has it as ``_deepcompile``."""

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        reducer: Reducer,
        features: List[Feature],
        placement: Placement,
        layouts: List[Layout],
    ):
        self._engine = weakref.ref(engine)
        self.reducer = reducer
        self.features = features
        self.placement = placement
        self.backward = BackwardLife(engine, reducer, self.placement, layouts)
        self.rules = rules_of(features)
        self.transform: Optional[Transform] = only(features, "transform")
        # The parameter groups whose gradients are transformed.
        self.transformed: Collection[int] = () if self.transform is None else self.transform.groups
        self.gather: AllGather = only(features, "gather") or AllGather(engine.optimizer)
        self.after_step = overriding(features, "after_step")
        # Functions to call when the engine is destroyed, in the reverse of the order in which they were added.
        self.undo = contextlib.ExitStack()
        # Why this engine must not train, if it must not.
        self.why_refused: Optional[str] = "engine.compile() failed half-way; create a new engine"
        # How a step ended that changed a part of the parameters, and functions that undo what refuses calls since.
        self._interrupted: Optional[str] = None
        self._undo_refusals = contextlib.ExitStack()

    @property
    def engine(self) -> Optional["DeepSpeedEngine"]:
        """The engine, or None if only the engine's optimizer still exists."""
        return self._engine()

    def find(self, cls: Type[Part]) -> Optional[Part]:
        """Returns the optional part of a class, if the engine has it."""
        return find(self.features, cls)

    def refuse(self) -> None:
        """Raises RuntimeError if this engine must not train."""
        if self.why_refused is not None:
            raise RuntimeError(self.why_refused)
        self.refuse_after_interruption()

    def refuse_after_interruption(self) -> None:
        """Raises RuntimeError if an exception ended a step that was changing parameters."""
        if self._interrupted is not None:
            raise RuntimeError(
                f"the last optimizer step was ended half way ({self._interrupted}), so that parameters may differ "
                "between ranks; load a checkpoint with its optimizer states before going on"
            )

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Context of the code of a step that changes parameters.

        After an exception in there, calls of the engine and state dicts of its module raise too.
        """
        try:
            yield
        except BaseException as error:
            self._interrupted = f"{type(error).__name__}: {error}"
            if self.engine is not None:
                refuse = Hook(lambda *_: self.refuse_after_interruption())
                self._undo_refusals.callback(self.engine.register_forward_pre_hook(refuse).remove)
                self._undo_refusals.callback(self.engine.module.register_state_dict_pre_hook(refuse).remove)
            raise

    def forget_interruption(self) -> None:
        """Called when all ranks have the same parameters again, and at the end of the engine."""
        self._interrupted = None
        self._undo_refusals.close()

    def let_go(self) -> None:
        """Drops all gradients, and undoes the setup of the engine."""
        self.backward.release()
        engine = self.engine
        if engine is not None:
            # If this flag stayed set, DeepSpeed's destroy() would give the module the hooks of an engine without
            # DeepCompile.
            engine._deepcompile_active = False
        self.forget_interruption()
        self.undo.close()


def rules_of(features: List[Feature]) -> List[Rule]:
    """Returns the rules of an engine with these parts, in the order in which a step asks them."""
    rules: List[Rule] = []
    for with_rules_of_part in overriding(features, "rules"):
        rules = with_rules_of_part(rules)
    return rules


def state_of(engine: "DeepSpeedEngine") -> Optional[EngineState]:
    """Returns the state of an engine, or None unless the engine is set up for DeepCompile ZeRO-1/2."""
    return getattr(engine.optimizer, "_deepcompile", None)
