# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Splits a joint graph as torch does, within an engine's budget for activations.

torch has one budget for the whole process. Within a budget, it also has the backward compute random numbers again, and
draw other ones (pytorch/pytorch issue 190758), so this file keeps those of the forward.
"""

import contextlib
import operator
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch._functorch import config, partitioners
from torch.fx import GraphModule, Node


def split_within(
    budget: Optional[float], joint: GraphModule, joint_inputs: Sequence, **kwargs: Any
) -> Tuple[GraphModule, GraphModule]:
    """Returns the forward and the backward graph of a joint graph.

    Args:
        budget: which part of the activations that torch would keep may be kept, from 0 to 1; None: as torch's own
            configuration says.
        joint, joint_inputs, kwargs: as torch's partitioners get them.
    """
    own = contextlib.nullcontext() if budget is None else config.patch(activation_memory_budget=float(budget))
    with own, _random_numbers_kept():
        return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Within it, a forward that keeps fewer activations keeps its random numbers too."""
    choose = partitioners.choose_saved_values_set

    # To keep more than torch chose is always right, and torch drops what the backward does not use.
    def choose_with_random_numbers(joint_graph, node_info, memory_budget=1.0):
        chosen = choose(joint_graph, node_info, memory_budget)
        if memory_budget == 1:
            return chosen
        random = [value for node in node_info.required_fw_nodes if draws_anew(node) for value in _values(node)]
        return [*chosen, *(value for value in random if value not in chosen)]

    # One thread at a time compiles, so no other one finds this function.
    partitioners.choose_saved_values_set = choose_with_random_numbers
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = choose


def draws_anew(node: Node) -> bool:
    """Whether a node would draw other random numbers if the backward ran it again."""
    # What an author has checkpointed is replayed with the generator's state of the forward.
    if not isinstance(node.target, torch._ops.OpOverload) or partitioners.must_recompute(node):
        return False
    for index, argument in enumerate(node.target._schema.arguments):
        # Attention is random only if it drops something. Kernels of others may lack the tag.
        if argument.name == "dropout_p":
            given = node.args[index : index + 1] or [node.kwargs.get(argument.name, argument.default_value)]
            return given[0] != 0
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _values(node: Node) -> List[Node]:
    """Returns the tensors that a node makes."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [node]
    return [
        user for user in node.users if user.target is operator.getitem and isinstance(user.meta["val"], torch.Tensor)
    ]
