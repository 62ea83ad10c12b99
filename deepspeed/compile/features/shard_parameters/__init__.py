# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a part of the blocks' parameters on each rank. This file has the function for users."""

import contextlib
from typing import TYPE_CHECKING, ContextManager

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# Parts without which this one does not work.
NEEDS = ("timeouts", "subclasses", "blocks", "overlap_gather")


def unsharded_parameters(engine: "DeepSpeedEngine") -> ContextManager[None]:
    """Returns a context in which each rank has all of an engine's parameters. All ranks enter it together.

    With ``compile.shard_parameters``, the caller must read, copy or change sharded parameters within this context.
    Changes must be the same on all ranks, and stay. Within the context, a rank may evaluate or generate
    alone. Without that option the context does nothing.
    """
    # Imported here, because it takes a second, and DeepSpeed imports this file with its configuration.
    from .feature import sharded_blocks

    sharded = sharded_blocks(engine)
    return contextlib.nullcontext() if sharded is None else sharded.gathered()
