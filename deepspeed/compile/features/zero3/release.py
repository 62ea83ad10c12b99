# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which backward graph of ZeRO-3 releases the buckets."""

from typing import Iterable, Tuple


def is_last_that_reduces(graph_order: Iterable[Tuple[int, bool]], graph_id: int) -> bool:
    """Whether the backward of ``graph_id`` is the last one that reduces. ZeRO-3's passes ask it.

    Backwards run in the reverse of forward order, so the last backward that reduces belongs to the first forward graph
    that reduces. All forward graphs of a step are known when the first backward is compiled. ``graph_order`` has
    (graph id, whether it needs a backward) of each forward graph, in forward order.
    """
    from deepspeed.compile.backend import param_manager

    def is_frozen(candidate):
        # ZeRO-3's passes record only whether a graph needs a backward. One input that requires grad makes a graph need
        # a backward, but a graph without trainable parameters has nothing to reduce.
        manager = param_manager.get(candidate)
        return manager is not None and not any(entry.param.requires_grad for entry in manager.params.values())

    reducing = (candidate for candidate, needs in graph_order if needs and not is_frozen(candidate))
    return next(reducing, graph_id) == graph_id
