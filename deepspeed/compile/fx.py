# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
# Names and signatures of the overridden functions are those of the base's fx.py, which is
# Copyright (c) Microsoft Corporation.
# SPDX-License-Identifier: Apache-2.0
"""The base's helpers on FX graphs, with this fork's end of a backward.

The base's ZeRO-3, AutoSP and AutoTP passes import these names too. In all stages, the graph that reduces last releases
the buckets.
"""

from typing import Iterable, List, Tuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .fx_base import *  # noqa: F403 (whatever a new base adds is found here too)
from .fx_base import _make_node_meta  # noqa: F401 (the base's passes import the first from here)

# By name, because an operator exists only once its native module is loaded.
_REDUCTIONS = ("deepcompile.reduce_grad.default", "dc.reduce_grad.default")


def get_output_node(graph: Graph) -> Node:
    """Returns the graph's output node. The base's own function returns an input that is called "output"."""
    return graph.output_node()


def reduce_nodes(graph: Graph) -> List[Node]:
    """Lists the reductions of a backward graph in the order in which they run."""
    return [node for node in graph.nodes if str(node.target) in _REDUCTIONS]


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


def add_end_backward(graph: Graph, graph_id: int, release_reduce_buckets: bool = True) -> None:
    """Inserts one ``end_backward`` after all reductions of a backward graph. Does nothing if there is no reduction."""
    reductions = reduce_nodes(graph)
    if not reductions:
        return
    # Registrations, which a reduction of this fork takes beside its gradient, lead to the engine's reducer.
    registrations = [argument for argument in reductions[-1].args[1:] if isinstance(argument, Node)]
    end_backward = getattr(torch.ops, reductions[-1].target.namespace).end_backward.default
    with graph.inserting_before(graph.output_node()):
        graph.call_function(end_backward, (reductions + registrations, graph_id, release_reduce_buckets))


def replace_reduce_outputs_with_none(graph: Graph) -> None:
    """Replaces each reduced gradient in the outputs of a backward graph by None, so autograd accumulates nothing."""
    output, reductions = graph.output_node(), {*reduce_nodes(graph)}
    output.args = (map_aggregate(output.args[0], lambda value: None if value in reductions else value),)
