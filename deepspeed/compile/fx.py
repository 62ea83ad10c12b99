# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
# Names and signatures of the overridden functions are those of the base's fx.py, which is
# Copyright (c) Microsoft Corporation.
# SPDX-License-Identifier: Apache-2.0
"""The base's helpers on FX graphs, for its ZeRO-3, AutoSP and AutoTP passes, with two of them mended."""

from typing import Iterable, Tuple

from torch.fx import Graph

from . import fx_base
from .fx_base import *  # noqa: F403 (whatever a new base adds is found here too)
from .fx_base import _make_node_meta  # noqa: F401 (the base's passes import the first from here)

# The base's own function returns an input that is called "output". The base's other functions find this one too.
get_output_node = fx_base.get_output_node = Graph.output_node


def should_release_reduce_buckets(graph_order: Iterable[Tuple[int, bool]], graph_id: int) -> bool:
    """Whether the backward of ``graph_id`` is the last one that reduces. ZeRO-3's passes ask it.

    Backwards run in the reverse of forward order, so the last backward that reduces belongs to the first forward graph
    that reduces. All forward graphs of a step are known when the first backward is compiled. ``graph_order`` has
    (graph id, whether it needs a backward) of each forward graph, in forward order.
    """
    from .backend import param_manager

    def is_frozen(candidate):
        # ZeRO-3's passes record only whether a graph needs a backward. One input that requires grad makes a graph need
        # a backward, but a graph without trainable parameters has nothing to reduce.
        manager = param_manager.get(candidate)
        return manager is not None and not any(entry.param.requires_grad for entry in manager.params.values())

    reducing = (candidate for candidate, needs in graph_order if needs and not is_frozen(candidate))
    return next(reducing, graph_id) == graph_id
