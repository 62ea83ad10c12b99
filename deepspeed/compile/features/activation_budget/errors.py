# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Explains errors of a backward that a budget causes."""

import contextlib
from typing import TYPE_CHECKING, Iterator

from ...zero_1_and_2.engine.state import state_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@contextlib.contextmanager
def explained_errors(engine: "DeepSpeedEngine") -> Iterator[None]:
    """Context of ``loss.backward()`` within ``engine.backward()``. Errors that the budget causes name the option."""
    try:
        yield
    except RuntimeError as error:
        budget = engine._config.compile_config.activation_memory_budget
        within_budget = state_of(engine) is not None and budget is not None and budget < 1
        if not (within_budget and "modified by an inplace operation" in str(error)):
            raise
        raise RuntimeError(
            f"{error} compile.activation_memory_budget={budget:g} makes a graph's backward read the graph's inputs; "
            "if one was changed, change a copy of it, or set the option to null"
        ) from error
