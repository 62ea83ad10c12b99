# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an optimizer step leaves that raised while it changed parameters: they may differ between ranks."""

import contextlib


class HalfStep:
    """Refuses to go on with such parameters until others are loaded."""

    def __init__(self):
        self._error = None
        self._hooks = []

    @contextlib.contextmanager
    def changing_parameters(self, engine):
        """Within it an exception is remembered, and the engine and its module refuse to be called or exported."""
        try:
            yield
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            self._hooks.append(engine.register_forward_pre_hook(self._refuse))
            self._hooks.append(engine.module.register_state_dict_pre_hook(self._refuse))
            raise

    def _refuse(self, *_):
        self.refuse()

    def refuse(self):
        """Raises RuntimeError if a step was ended by an exception while parameters were being changed."""
        if self._error is not None:
            raise RuntimeError(
                f"the last optimizer step was ended half way ({self._error}), so that parameters may differ between "
                "ranks; load a checkpoint with its optimizer states before going on"
            )

    def forget(self):
        """Parameters are whole again."""
        self._error = None
        while self._hooks:
            self._hooks.pop().remove()
