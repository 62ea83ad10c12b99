# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of a compiled graph at each moment.

Inductor fuses elementwise operators into the kernels that read their results. Such a result has memory only if the
graph returns it, if an operator that is no kernel of Inductor's reads it, such as a product of matrices, or if several
kernels would read too much to compute it again. All other values have memory from their operator to the last reader. A
fused kernel may write its result over an input that nobody reads later, if it reads each element where it writes one.
"""

import operator
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set

import torch
from torch.fx import Graph, GraphModule, Node

# Operators that Inductor fuses although torch does not mark them as pointwise.
_FUSED = set(
    "convert_element_type full full_like iota arange clone constant_pad_nd cat where gather embedding index "
    "scalar_tensor zeros zeros_like ones ones_like empty empty_like masked_fill slice_scatter select_scatter copy "
    "fill rand randn bernoulli native_dropout inductor_seeds inductor_lookup_seed inductor_random repeat roll flip "
    "new_zeros new_ones new_full _to_copy tril triu lift_fresh_copy eye".split()
)
_REDUCTIONS = set("sum mean amax amin var var_mean any all prod argmax argmin logsumexp".split())
_SAME_ORDER = {"view", "_unsafe_view", "reshape", "detach", "alias", "squeeze", "unsqueeze"}
_VIEWS = _SAME_ORDER | {"t", "unbind", "split", "split_with_sizes"}
_COPIES = {"convert_element_type", "_to_copy", "clone", "copy"}


class Saved(NamedTuple):
    """A tensor that a forward graph keeps for its backward.

    Attributes:
        value: a fake tensor like it.
        input: the index of the graph's input whose memory it is, or None.
        output: the index of the graph's output whose memory it is, or None.
        memory: equal numbers have one memory.
        bytes: of its memory, which the graph itself has made; 0 for that of an input or output.
    """

    value: Any
    input: Optional[int]
    output: Optional[int]
    memory: int
    bytes: int


class Moment(NamedTuple):
    """A part of a graph's run.

    Attributes:
        most: the most bytes within it, beside those that were there before the graph ran.
        after: the bytes at its end, less the gradient with which it ends.
        gradient: the index of the graph's result that is complete at its end, or None.
    """

    most: int
    after: int
    gradient: Optional[int] = None


Life = List[Moment]


def bytes_of(value: Any) -> int:
    """Returns the bytes of a tensor's elements, or of all tensors of a tuple."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, (tuple, list)) else 0


def life_of_forward(gm: GraphModule, outputs: int, saved: List[Saved]) -> Life:
    """Returns the life of a forward graph, and fills ``saved`` with its results after the first ``outputs``."""
    graph = gm.graph
    returned = list(graph.output_node().args[0])
    bases = {base_of(node): index for index, node in reversed([*enumerate(returned[:outputs])]) if _is_node(node)}
    inputs = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    numbers: Dict[Node, int] = {}
    for node in returned[outputs:]:
        if not _is_node(node) or not isinstance(node.meta.get("val"), torch.Tensor):
            saved.append(Saved(None, None, None, -1, 0))
            continue
        base = base_of(node)
        is_own = base not in inputs and base not in bases and base not in numbers
        size = bytes_of(base.meta.get("val")) if is_own else 0
        number = numbers.setdefault(base, len(numbers))
        saved.append(Saved(node.meta["val"], inputs.get(base), bases.get(base), number, size))
    return _life(graph, {}, (), set())


def life_of_backward(gm: GraphModule, saved: List[Saved], parameters: int, apart: Optional[int]) -> Life:
    """Returns the life of a backward graph: what it drops of ``saved``, and when its first results are complete.

    These are the gradients of so many ``parameters``, and leave the graph. ``apart`` numbers the memory of a tensor at
    which training cuts the graph in two, so that no kernel writes over it.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    owned: Dict[Node, int] = {}
    groups: Dict[int, List[Node]] = {}
    kept = set()
    for node, tensor in zip(placeholders, saved):
        if tensor.input is None and tensor.output is None and tensor.value is not None:
            owned[node] = tensor.bytes
            if tensor.memory == apart:
                kept.add(node)
            groups.setdefault(tensor.memory, []).append(node)
    for nodes in groups.values():
        # One memory is dropped when the last of its tensors has been read.
        last = max(nodes, key=lambda node: _last_reader(gm.graph, node))
        for node in nodes:
            if node is not last:
                owned[last] += owned.pop(node)
    gradients = list(gm.graph.output_node().args[0])[:parameters]
    return _life(gm.graph, owned, gradients, kept)


def _is_node(value):
    return isinstance(value, Node)


def _name(node):
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _is_view(node):
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    return _name(node) in _VIEWS or getattr(node.target, "is_view", False)


def base_of(node: Node) -> Node:
    """Returns the node that has made the memory of a node's result."""
    while node.op == "call_function" and (_is_view(node) or node.target is operator.getitem):
        if node.target is operator.getitem and not _is_view(node):
            return node
        node = node.all_input_nodes[0]
    return node


def _is_reduction(node):
    return _name(node) in _REDUCTIONS


def _is_fused(node):
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        # Plain functions compute numbers.
        return node.op == "call_function" and node.target is not operator.getitem
    return _name(node) in _FUSED or torch.Tag.pointwise in node.target.tags


def _with_memory(graph: Graph) -> Set[Node]:
    """Returns the nodes whose results have memory of their own."""
    from torch._inductor import config

    found = _with_memory_for_operators(graph)
    for node in graph.nodes:
        # As `should_realize_on_reuse()` of torch's Inductor. Users that are one kernel leave nothing in memory.
        if node.op == "call_function" and _is_fused(node) and node not in found and len(node.users) > 1:
            if len(_reads(node, found)) > config.realize_reads_threshold and _read_by_several(node):
                found.add(node)
    return {node for node in found if bytes_of(node.meta.get("val"))}


def _read_by_several(node):
    """Whether kernels of several shapes read the fused values."""
    open_, kernels, seen = [node], set(), set()
    while open_:
        for user in open_.pop().users:
            if user not in seen and user.op == "call_function":
                seen.add(user)
                if _is_view(user) or (_is_fused(user) and user.users):
                    open_.append(user)
                else:
                    kernels.add(
                        (_is_reduction(user), str(user.args[1:]), getattr(user.meta.get("val"), "shape", None))
                    )
    return len(kernels) > 1


def _with_memory_for_operators(graph):
    found = set()
    for node in graph.nodes:
        if node.op == "output":
            found.update(base for source in node.all_input_nodes if (base := base_of(source)).op == "call_function")
        if node.op != "call_function" or _is_view(node):
            continue
        if node.target is operator.getitem or (_is_reduction(node) and not _has_items(node)):
            found.add(node)
        elif not _is_fused(node) and not _is_reduction(node):
            if not _has_items(node):
                found.add(node)
            found.update(base for source in node.all_input_nodes if (base := base_of(source)).op == "call_function")
    return found


def _has_items(node):
    """Whether a node returns several tensors, which other nodes take out one by one."""
    return isinstance(node.meta.get("val"), (tuple, list))


def _reads(node: Node, with_memory: Set[Node]) -> Set[Node]:
    """Returns the nodes whose memory the kernel reads that makes a node's result."""
    found, open_, seen = set(), list(node.all_input_nodes), set()
    while open_:
        base = base_of(open_.pop())
        if base in seen:
            continue
        seen.add(base)
        if base in with_memory or base.op == "placeholder":
            found.add(base)
        else:
            open_ += base.all_input_nodes
    return found


def _read_in_place(node: Node, with_memory: Set[Node]) -> Set[Node]:
    """Returns those of :func:`_reads` that the kernel reads only at the elements that it writes."""
    elsewhere, in_place, seen = set(), set(), set()
    open_ = [(node, True)]
    while open_:
        reader, same_place = open_.pop()
        same_place = same_place and _keeps_places(reader)
        for read in reader.all_input_nodes:
            if read in with_memory or read.op == "placeholder":
                (in_place if same_place else elsewhere).add(read)
            elif (read, same_place) not in seen:
                seen.add((read, same_place))
                open_.append((read, same_place))
    return in_place - elsewhere


def _keeps_places(node):
    """Whether each element of a node's result is made of the elements at its own place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return _name(node) in _SAME_ORDER | _COPIES or torch.Tag.pointwise in node.target.tags


def _last_reader(graph, node):
    order = {node: index for index, node in enumerate(graph.nodes)}
    open_, last, seen = [node], -1, set()
    while open_:
        for user in open_.pop().users:
            if user not in seen:
                seen.add(user)
                last = max(last, order[user])
                if _is_view(user) or _is_fused(user):
                    open_.append(user)
    return last


def _life(graph: Graph, owned: Dict[Node, int], gradients: Iterable, kept: Set[Node]) -> Life:
    """Returns the life of a graph.

    Args:
        graph: the graph.
        owned: inputs that the graph may drop -> their bytes.
        gradients: the graph's results that leave it one by one, at once when they are complete.
        kept: inputs that no kernel writes over.
    """
    with_memory = _with_memory(graph)
    kernels = [node for node in graph.nodes if node in with_memory]
    reads = {node: _reads(node, with_memory) for node in kernels}
    last = {base: index for index, node in enumerate(kernels) for base in reads[node]}
    returned = {base_of(node) for node in graph.output_node().all_input_nodes}
    leaving: Dict[Node, List[int]] = {}
    for index, node in enumerate(gradients):
        if _is_node(node):
            leaving.setdefault(base_of(node), []).append(index)
    size = {node: bytes_of(node.meta.get("val")) for node in kernels}
    size.update(owned)
    live = most = 0
    life: Life = []
    for index, node in enumerate(kernels):
        dying = [base for base in reads[node] if last[base] == index and base in size and base not in returned]
        # Operators that are no kernels of Inductor's read all they need while they write.
        reused = None
        if _is_fused(node):
            in_place = _read_in_place(node, with_memory)
            reused = next(
                (buffer for buffer in dying if buffer in in_place - kept and size[buffer] == size[node]), None
            )
        live += 0 if reused is not None else size[node]
        most = max(most, live)
        live -= sum(size[base] for base in dying if base is not reused)
        if node not in last and node not in returned:
            live -= size[node]
        for number in leaving.get(node, ()):
            life.append(Moment(most, live := live - size[node], number))
            most, size[node] = live, 0
    # Values that no kernel reads are dropped at the end.
    live -= sum(count for base, count in owned.items() if base not in last)
    life.append(Moment(most, live))
    return life
