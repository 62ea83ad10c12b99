# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a part of the blocks' parameters on each rank. This file has the function for users."""

import contextlib
from typing import TYPE_CHECKING, ContextManager, Iterable, Union

if TYPE_CHECKING:
    from torch.nn import Parameter

    from deepspeed.runtime.engine import DeepSpeedEngine

# Parts without which this one does not work.
NEEDS = ("fixes.base", "features.blocks", "features.overlap_gather")


def unsharded_parameters(
    engine: "DeepSpeedEngine", parameters: "Union[Parameter, Iterable[Parameter], None]" = None
) -> ContextManager[None]:
    """Returns a context in which each rank has an engine's parameters whole. All ranks enter it together.

    With ``compile.shard_parameters``, the caller must read, copy or change sharded parameters within this context.
    Changes must be the same on all ranks, and stay. Without that option the context does nothing.

    Args:
        engine: the engine.
        parameters: those that the caller reads or changes. What is gathered together with one of them becomes whole,
            such as a block, an embedding or a head, and nothing else. So a model that does not fit can be gone through
            part by part. None: all, and then a rank may evaluate or generate alone.
    """
    # Imported here, because it takes a second, and DeepSpeed imports this file with its configuration.
    from .feature import sharded_blocks

    sharded = sharded_blocks(engine)
    return contextlib.nullcontext() if sharded is None else sharded.gathered(parameters)
