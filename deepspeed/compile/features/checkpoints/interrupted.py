# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Refuses calls of an engine after an exception ended a step while it changed parameters."""

import contextlib
from typing import TYPE_CHECKING, Iterator, Optional

from ...zero_1_and_2.hooks import Hook

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class InterruptedStep:
    """Remembers that a step was interrupted: an exception ended the step while it changed parameters.

    Parameters may differ between ranks then. So the engine refuses to go on until a checkpoint is loaded.
    """

    def __init__(self):
        self._error = None
        self._hooks = []

    @contextlib.contextmanager
    def changing_parameters(self, engine: Optional["DeepSpeedEngine"]) -> Iterator[None]:
        """Context of the code that changes parameters.

        After an exception in this context, calls of the engine and state dicts of its module raise RuntimeError. If
        only the engine's optimizer still exists, its steps do.
        """
        try:
            yield
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            if engine is not None:
                refuse = Hook(lambda *_: self.refuse())
                self._hooks.append(engine.register_forward_pre_hook(refuse))
                self._hooks.append(engine.module.register_state_dict_pre_hook(refuse))
            raise

    def refuse(self) -> None:
        """Raises RuntimeError if an exception ended a step while parameters were being changed."""
        if self._error is not None:
            raise RuntimeError(
                f"the last optimizer step was ended half way ({self._error}), so that parameters may differ between "
                "ranks; load a checkpoint with its optimizer states before going on"
            )

    def forget(self) -> None:
        """Called when all ranks have the same parameters again."""
        self._error = None
        while self._hooks:
            self._hooks.pop().remove()
