# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a part of the activations that a backward needs, and computes the rest again.

Splits a joint graph as torch does, with some differences.

Torch has one budget of activations for a process; here each engine has its own. Under a budget, torch also recomputes
values in the backward that differ there: random numbers (pytorch/pytorch issue 190758), results of foreign operators,
reads of a buffer from before the forward changed it (pull request 197039), and reads of a buffer that other code
changes before the backward. Here the forward keeps these values, or a copy of the buffer.
"""

import contextlib
import operator
import types
import weakref
from pathlib import Path
from typing import Any, Collection, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch._functorch import config, partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx import Graph, GraphModule, Node

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.graph.keys import hash_of_source
from ...zero_1_and_2.graph.reductions import index_of

# The mark of nodes that the forward keeps if the backward reads them.
_IS_KEPT = "deepcompile_is_kept"
# A buffer of at most so many elements may be copied for each layer and forward. Statistics and scales have fewer, and
# quantized weights, which are buffers in some packages, have more.
SMALL_BUFFER = 2**16


class ActivationBudget(Feature):
    """Splits joint graphs within the engine's budget, or, without one, within the budget of the process."""

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        budget = request.options.activation_memory_budget
        if budget is not None and not request.compiles:
            yield (
                f"compile.activation_memory_budget={budget} has no effect, because torch.compile is switched off by "
                "compile_kwargs['disable'] or TORCH_COMPILE_DISABLE"
            )

    def __init__(self, context: SetUpContext):
        self._budget = context.request.options.activation_memory_budget
        self._module = weakref.ref(context.module)
        context.backend.split = self.split

    def split(self, inputs: Sequence) -> "SplitWithin":
        return SplitWithin(self._budget, self._small_buffers(inputs))

    def _small_buffers(self, inputs):
        """Returns the indices of inputs that are buffers of the model and small beside activations."""
        module = self._module()
        # Compare with None: a model's `__bool__` may raise.
        all_buffers = () if module is None else module.buffers()
        buffers = {id(buffer) for buffer in all_buffers if buffer.numel() <= SMALL_BUFFER}
        return tuple(index for index, value in enumerate(inputs) if id(value) in buffers)


FEATURE = ActivationBudget


class SplitWithin(NamedTuple):
    """Splits a joint graph by :func:`split_joint`, with this budget and these buffers."""

    budget: Optional[float]
    buffers: Tuple[int, ...] = ()

    @property
    def key(self) -> object:
        """Distinguishes this split from others in torch's caches."""
        return hash_of_source(Path(__file__)), self.budget, self.buffers

    def __call__(self, joint: GraphModule, joint_inputs: Sequence, **kwargs: Any) -> Tuple[GraphModule, GraphModule]:
        return split_joint(joint, joint_inputs, self.budget, self.buffers, **kwargs)


def split_joint(
    joint: GraphModule, joint_inputs: Sequence, budget: Optional[float], buffers: Collection[int] = (), **kwargs: Any
) -> Tuple[GraphModule, GraphModule]:
    """Returns the forward and the backward graph of a joint graph.

    Args:
        joint, joint_inputs, kwargs: as torch's partitioners get them.
        budget: the part of the activations that may be kept, from 0 to 1; None: torch's own setting.
        buffers: indices of the frame's inputs that other code may change before the backward.
    """
    within = contextlib.nullcontext() if budget is None else config.patch(activation_memory_budget=budget)
    with within:
        if config.activation_memory_budget < 1:
            _copy(joint, buffers)
        return _partitioner()(joint, joint_inputs, **kwargs)


def _copy(joint: GraphModule, buffers: Collection[int]) -> None:
    """Makes a joint graph read copies of buffers, and the forward keep the copies that the backward reads."""
    for node in joint.graph.find_nodes(op="placeholder"):
        reads = [user for user in node.users if user.target is not torch.ops.aten.copy_.default]
        if index_of(node) not in buffers or not reads:
            continue
        behind_inputs = next(node for node in joint.graph.nodes if node.op != "placeholder")
        with joint.graph.inserting_before(behind_inputs):
            copied = joint.graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta["val"] = node.meta["val"].clone()
        copied.meta[_IS_KEPT] = True
        node.replace_all_uses_with(copied, delete_user_cb=reads.__contains__)
    joint.recompile()


def _partitioner():
    """Returns a copy of torch's partitioner that calls :func:`_values_to_keep`.

    Marks on nodes (``CheckpointPolicy.MUST_SAVE``) do not suffice. A budget of 0 ignores them. And if all values to
    keep are marked, torch 2.13 and older save the tuple of a marked operator with several results, which fails.
    """
    torchs = partitioners.min_cut_rematerialization_partition
    if "choose_saved_values_set" not in torchs.__code__.co_names or torchs.__closure__:
        raise RuntimeError(
            f"DeepCompile cannot split graphs with torch {torch.__version__}, whose partitioner asks another function "
            "what to keep; use a release of torch that ds_report names as tested"
        )
    # The copy has its own globals, so nothing changes for other callers.
    names = {**torchs.__globals__, "choose_saved_values_set": _values_to_keep}
    partitioner = types.FunctionType(torchs.__code__, names, argdefs=torchs.__defaults__)
    partitioner.__kwdefaults__ = torchs.__kwdefaults__
    return partitioner


def _values_to_keep(joint: Graph, node_info: Any, memory_budget: float = 1.0) -> List[Node]:
    """Returns the values that torch chooses to keep, and those that the backward must not compute again."""
    # Keeping more than torch has chosen is always correct, and torch drops values that the backward does not use.
    chosen = partitioners.choose_saved_values_set(joint, node_info, memory_budget)
    only_in_forward = _reads_of_changed_inputs(joint).union(filter(runs_once, joint.nodes))
    only_in_forward.update(node for node in joint.nodes if _IS_KEPT in node.meta)
    values = [value for node in node_info.required_fw_nodes if node in only_in_forward for value in _values(node)]
    return [*chosen, *(value for value in values if value not in chosen)]


def runs_once(node: Node) -> bool:
    """Whether only the forward may run a node, because the backward might get another result, or have an effect."""
    target = node.target
    # Checkpointing draws random numbers again with the generator's state of the forward.
    if partitioners.must_recompute(node):
        return False
    # Foreign operators draw random numbers or communicate without a tag, and higher-order operators may call them.
    # Without a budget, torch runs none of them again. Plain functions, such as those of numbers, have no namespace.
    if getattr(target, "namespace", "aten") not in ("aten", "prims", "prim"):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    for index, argument in enumerate(target._schema.arguments):
        # Attention is random only if it drops something. Kernels may lack the tag.
        if argument.name == "dropout_p":
            given = node.args[index : index + 1] or [node.kwargs.get(argument.name, argument.default_value)]
            return given[0] != 0
    return torch.Tag.nondeterministic_seeded in target.tags


def _reads_of_changed_inputs(joint: Graph) -> Set[Node]:
    """Returns the nodes that read an input which the forward changes at its end, or right after it."""
    descriptors = joint.output_node().meta.get("desc", ())
    later = {output.mutated_input for output in descriptors if isinstance(output, InputMutationAOTOutput)}
    copies = joint.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    open_ = [node for node in joint.find_nodes(op="placeholder") if node.meta.get("desc") in later]
    open_ += [node.args[0] for node in copies]
    reads: Set[Node] = set()
    while open_:
        for user in open_.pop().users:
            # A view reads nothing, but its users do.
            (open_.append if _is_view(user) else reads.add)(user)
    return reads.difference(copies)


def _is_view(node):
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def _values(node: Node) -> List[Node]:
    """Lists the nodes of the tensors that a node returns."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    # A tuple, or the results of a higher-order operator.
    return [value for user in node.users if user.target is operator.getitem for value in _values(user)]
