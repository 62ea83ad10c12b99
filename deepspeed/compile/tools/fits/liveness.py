# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of a compiled graph at each moment, as torch's Inductor plans it.

Inductor lowers the graph and chooses its kernels, but generates no code. ``torch._inductor.memory`` then says which
values have memory, and from which kernel to which.
"""

import collections
import copy
import operator
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch.fx import GraphModule, Node

_VIEWS = set("view _unsafe_view reshape detach alias squeeze unsqueeze t unbind split split_with_sizes".split())


class Saved(NamedTuple):
    """A tensor that a forward graph keeps for its backward."""

    value: Any  # a fake tensor like it
    input: Optional[int]  # the index of the graph's input whose memory it is, or None
    output: Optional[int]  # the index of the graph's output whose memory it is, or None
    memory: int  # equal numbers have one memory
    bytes: int  # of its memory, which the graph itself has made; 0 for that of an input


class Moment(NamedTuple):
    """A part of a graph's run, or of a step."""

    most: int  # the most bytes within it: of a graph, beside those that were there before it ran
    after: int  # the bytes at its end, less the gradient with which it ends
    # The gradient that is complete at its end, or None: its index among a graph's results, or its parameter's name.
    gradient: Any = None
    block: Optional[int] = None  # of a step, the number of the block that runs in the moment, or None


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
        is_own = base not in inputs and base not in numbers
        size = bytes_of(base.meta.get("val")) if is_own else 0
        number = numbers.setdefault(base, len(numbers))
        saved.append(Saved(node.meta["val"], inputs.get(base), bases.get(base), number, size))
    return _life(gm, {}, 0)


def life_of_backward(gm: GraphModule, saved: List[Saved], parameters: int) -> Life:
    """Returns the life of a backward graph: when it drops tensors of ``saved``, and when gradients are complete.

    The first results of the graph are the gradients of so many ``parameters``. Each leaves the graph at once.
    """
    owned = {
        node.target: tensor
        for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), saved)
        if tensor.input is None and tensor.value is not None
    }
    return _life(gm, owned, parameters)


def _is_node(value):
    return isinstance(value, Node)


def _is_view(node):
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    target = node.target
    name = target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""
    return name in _VIEWS or getattr(target, "is_view", False)


def base_of(node: Node) -> Node:
    """Returns the node that has made the memory of a node's result."""
    while node.op == "call_function" and (_is_view(node) or node.target is operator.getitem):
        if node.target is operator.getitem and not _is_view(node):
            return node
        node = node.all_input_nodes[0]
    return node


def _life(gm: GraphModule, owned: Dict[Any, Saved], parameters: int) -> Life:
    """Returns the life of a graph.

    Args:
        owned: name of an input that the graph may drop -> what it is.
        parameters: how many of the graph's results, the first ones, leave it one by one when they are complete.
    """
    kernels, buffers, names = _plan(gm)
    inputs = {node.target for node in gm.graph.find_nodes(op="placeholder")}
    gradients = collections.defaultdict(list)
    for index, node in enumerate(gm.graph.output_node().args[0][:parameters]):
        if _is_node(node):
            gradients[names[index]].append(index)
    # Kernel -> (name, bytes) of the buffers that it makes, or that it reads last.
    made: List[List[Tuple[str, int]]] = [[] for _ in kernels]
    dropped: List[List[Tuple[str, int]]] = [[] for _ in kernels]
    # Kernel -> (bytes, numbers) of the gradients that it makes.
    complete: List[List[Tuple[int, List[int]]]] = [[] for _ in kernels]
    # Memory of inputs -> the last kernel that reads it. Several inputs may have one memory.
    last: Dict[int, int] = {}
    for buffer in buffers:
        name, end = buffer.buffer.get_name(), buffer.end_step
        if name in owned:
            # What the graph returns has no end.
            last[owned[name].memory] = max(last.get(owned[name].memory, 0), len(kernels) if end < 0 else end)
        elif name not in inputs and (end != buffer.start_step or kernels[end].is_extern()):
            # A value that only its own kernel reads has no memory.
            made[buffer.start_step].append((name, buffer.size_alloc))
            if name in gradients:
                complete[buffer.start_step].append((buffer.size_free, gradients[name]))
            elif end >= 0:
                dropped[end].append((name, buffer.size_free))
    # The graph drops what no kernel reads at its end.
    ends = collections.Counter()
    for tensor in owned.values():
        ends[last.get(tensor.memory, len(kernels) - 1)] += tensor.bytes
    live = most = 0
    life: Life = []
    for index, kernel in enumerate(kernels):
        live += sum(size for _, size in made[index])
        most = max(most, live + _workspace(kernel) - _written_over(kernel, made[index], dropped[index]))
        live -= ends[index] + sum(size for _, size in dropped[index])
        for size, numbers in complete[index]:
            for number in numbers:
                live -= size
                life.append(Moment(most, live, number))
                most, size = live, 0
    life.append(Moment(most, live))
    return life


def _workspace(kernel: Any) -> int:
    """Returns the bytes that a kernel takes while it runs, beside its results.

    The backward of a GPU's attention adds up the gradient of queries in fp32, and keeps a number for each row. Where
    keys have fewer heads, it makes their gradients for all heads of the queries before it adds them up. (Inferred from
    peaks of cuDNN on an H200, torch 2.11; flash-attention's own kernels take as much.)
    """
    if not kernel.is_extern() or "attention_for_cpu_backward" not in str(getattr(kernel.node, "op_overload", "")):
        return 0
    _, queries, *keys_and_values = kernel.node.inputs[:4]
    _, heads, _, width = map(int, queries.get_size())
    numel, for_all_heads = int(queries.get_numel()), 0
    for tensor in keys_and_values:
        own_heads = int(tensor.get_size()[1])
        if own_heads != heads:
            for_all_heads += int(tensor.get_numel()) // own_heads * heads
    return 4 * (numel + numel // width) + queries.get_dtype().itemsize * for_all_heads


def _written_over(kernel: Any, made: List[Tuple[str, int]], dropped: List[Tuple[str, int]]) -> int:
    """Returns how many bytes a kernel writes over buffers that it reads last, if each element at its own place."""
    from torch._inductor.dependencies import MemoryDep

    if kernel.is_extern():
        return 0
    read = collections.defaultdict(set)
    for access in kernel.read_writes.reads:
        read[access.name].add(access.index if isinstance(access, MemoryDep) else None)
    written = {access.name: {access.index} for access in kernel.read_writes.writes if isinstance(access, MemoryDep)}
    found, free = 0, list(dropped)
    for name, size in made:
        over = next((other for other in free if other[1] == size and read[other[0]] == written.get(name)), None)
        if over is not None:
            free.remove(over)
            found += size
    return found


def _plan(gm: GraphModule) -> Tuple[List[Any], List[Any], List[Optional[str]]]:
    """Returns the kernels that Inductor makes of a graph, their buffers, and the names of the graph's results."""
    from torch._guards import detect_fake_mode
    from torch._inductor import ir, memory
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(inputs)
    gm = copy.deepcopy(gm)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), torch.no_grad():
        _recursive_post_grad_passes(gm)
        lowered = GraphLowering(gm, inputs, mode.shape_env)
        with V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]):
            lowered.run(*inputs)
            lowered._update_scheduler()
            scheduler, returned = lowered.scheduler, OrderedSet(lowered.get_output_names())
            given = OrderedSet(lowered.graph_inputs)
            _, freeable = memory.prepare_planning_info(
                scheduler.nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, given, returned
            )
            buffers, *_ = memory.compute_memory_timeline(scheduler.nodes, freeable, returned)
    others = ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer
    names = [None if isinstance(result, others) else result.get_name() for result in lowered.graph_outputs]
    return scheduler.nodes, buffers, names
