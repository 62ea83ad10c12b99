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
    own = contextlib.nullcontext() if budget is None else config.patch(activation_memory_budget=float(budget))
    with own, _kept_what_changes():
        return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


@contextlib.contextmanager
def _kept_what_changes() -> Iterator[None]:
    """Within it, torch's partitioner keeps what it chooses to keep, and what the backward must not compute again."""
    choose = partitioners.choose_saved_values_set

    # To keep more than torch has chosen is always right, and torch drops what the backward does not use.
    def choose_more(joint_graph, node_info, memory_budget=1.0):
        chosen = choose(joint_graph, node_info, memory_budget)
        changes = _reads_of_changed_inputs(joint_graph)
        changes.update(node for node in joint_graph.nodes if draws_anew(node))
        values = [value for node in node_info.required_fw_nodes if node in changes for value in _values(node)]
        return [*chosen, *(value for value in values if value not in chosen)]

    # Dynamo compiles in one thread at a time, so no other thread finds this function.
    partitioners.choose_saved_values_set = choose_more
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = choose


def draws_anew(node: Node) -> bool:
    """Whether a node would draw other random numbers if the backward ran it again."""
    # What the model checkpoints is drawn again with the generator's state of the forward.
    if not isinstance(node.target, torch._ops.OpOverload) or partitioners.must_recompute(node):
        return False
    for index, argument in enumerate(node.target._schema.arguments):
        # Attention is random only if it drops something. Kernels of others may lack the tag.
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
