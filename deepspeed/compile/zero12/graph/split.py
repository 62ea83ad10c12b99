# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Splits a joint graph as torch does, with two differences.

torch has one budget of activations for a whole process, and here each engine has its own. And torch computes in the
backward again what is not the same there: random numbers within a budget (pytorch/pytorch issue 190758), and what was
read of a buffer before the forward changed it (pull request 197039). Here the forward keeps these values.
"""

import contextlib
import operator
from typing import Any, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch._functorch import config, partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx import Graph, GraphModule, Node


def split_joint(
    joint: GraphModule, joint_inputs: Sequence, budget: Optional[float], **kwargs: Any
) -> Tuple[GraphModule, GraphModule]:
    """Returns the forward and the backward graph of a joint graph.

    Args:
        joint, joint_inputs, kwargs: as torch's partitioners get them.
        budget: how much of the activations that torch would keep may be kept, from 0 to 1; None: as torch is
            configured.
    """
    budget = config.activation_memory_budget if budget is None else budget
    keeps_more = _kept() if _to_keep(joint.graph, budget) else contextlib.nullcontext()
    with config.patch(activation_memory_budget=budget), keeps_more:
        return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Within it, torch's partitioner keeps what it chooses to keep, and what the backward must not compute again.

    A mark that a node must be saved would do for other nodes, but torch ignores it on the outputs of a node that makes
    several tensors, and within a budget of 0.
    """
    choose = partitioners.choose_saved_values_set

    # To keep more than torch has chosen is always right, and torch drops what the backward does not use.
    def choose_more(joint_graph, node_info, memory_budget=1.0):
        # These are copies of the nodes that the partitioner was given.
        chosen, nodes = choose(joint_graph, node_info, memory_budget), _to_keep(joint_graph, memory_budget)
        values = [value for node in node_info.required_fw_nodes if node in nodes for value in _values(node)]
        return [*chosen, *(value for value in values if value not in chosen)]

    # Dynamo compiles in one thread at a time, so no other thread finds this function.
    partitioners.choose_saved_values_set = choose_more
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = choose


def _to_keep(joint: Graph, budget: float) -> Set[Node]:
    """Returns the nodes that the backward must not compute again."""
    nodes = _reads_of_changed_inputs(joint)
    return nodes.union(filter(runs_once, joint.nodes)) if budget < 1 else nodes


def runs_once(node: Node) -> bool:
    """Whether the backward must not run a node again: it would draw other random numbers, or do who knows what."""
    # What the model checkpoints is drawn again with the generator's state of the forward.
    if not isinstance(node.target, torch._ops.OpOverload) or partitioners.must_recompute(node):
        return False
    if node.target.namespace not in ("aten", "prims"):
        # Others may draw, send or write, and need not say so. Within a budget of 1, torch computes none again.
        return True
    for index, argument in enumerate(node.target._schema.arguments):
        # Attention is random only if it drops something.
        if argument.name == "dropout_p":
            given = node.args[index : index + 1] or [node.kwargs.get(argument.name, argument.default_value)]
            return given[0] != 0
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _reads_of_changed_inputs(joint: Graph) -> Set[Node]:
    """Returns the nodes that read an input which the forward changes at its end, or right after it."""
    descriptors = joint.output_node().meta.get("desc", ())
    later = {each.mutated_input for each in descriptors if isinstance(each, InputMutationAOTOutput)}
    copies = joint.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    open_ = [node for node in joint.find_nodes(op="placeholder") if node.meta.get("desc") in later]
    open_ += [node.args[0] for node in copies]
    reads: Set[Node] = set()
    while open_:
        for user in open_.pop().users:
            # A view reads nothing, but what uses it does.
            (open_.append if _is_view(user) else reads.add)(user)
    return reads.difference(copies)


def _is_view(node):
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def _values(node: Node) -> List[Node]:
    """Returns the tensors that a node makes."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        return [value for user in node.users if user.target is operator.getitem for value in _values(user)]
    return [node] if isinstance(node.meta.get("val"), torch.Tensor) else []
