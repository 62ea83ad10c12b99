# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Compiles what an optimizer's ``step()`` does to a range of elements.

``torch.export`` records the step as a graph. The graph is cut in two: what depends on scalars alone, such as Adam's
bias corrections, runs once a step, in fp64. Inductor compiles the rest, which reads and writes the elements.
"""

import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Tuple, Type

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

# Smaller learning rates count as zero. Adam divides by the rate in fp32, where a quotient may overflow.
LEAST_RATE = 1e-30


class Kind(NamedTuple):
    """What an update reads and writes."""

    gradient: torch.dtype  # of gradients
    new: torch.dtype  # in which the new values of parameters are written
    aligned: bool  # whether their memory begins at a multiple of 16 bytes
    scaled: bool  # whether gradients are multiplied by a factor


class Update(NamedTuple):
    """The compiled update of all parameter groups whose settings but the learning rate are equal."""

    scalars: Callable  # (learning rate, scalar states) -> (new scalar states, fp32 scalars for `elements`)
    elements: Callable  # (gradient, factor, master, new, per-element states, scalars), changes master, new and states


def compile_update(
    optimizer: torch.optim.Optimizer,
    settings: Dict[str, Any],
    master: torch.Tensor,
    states: Dict[str, torch.Tensor],
    learning_rate: torch.Tensor,
    scalars: Dict[str, torch.Tensor],
    kind: Kind,
) -> Update:
    """Compiles the update of a range of elements.

    Args:
        optimizer: the optimizer. It is not changed.
        settings: all settings of the parameter group but the learning rate.
        master: an example of a range of master weights: [rows, columns]. The update takes any number of rows.
        states: name -> an example of a range of a state that has a value for each element.
        learning_rate: an fp64 tensor [].
        scalars: name -> an fp64 tensor [] of another state.
        kind: of the update.

    Raises:
        Exception: whatever torch raises if it cannot record or compile the update.
    """
    # No function of torch's own compiles a graph for inputs of varying length without Dynamo's guards in each call.
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad(), warnings.catch_warnings():
        # Torch 2.13 warns of a name that torch.export itself still uses.
        warnings.simplefilter("ignore", FutureWarning)
        module = _Range(_worker(optimizer), settings, [*states, *scalars])
        parts = _cut(_record(module, master, [*states.values()], learning_rate, [*scalars.values()], kind))
        if len(parts.given_scalars) != 1 + len(scalars):
            raise RuntimeError("the optimizer's step uses tensors that are neither its states nor settings")
        elements, examples = _graph_of_elements(parts)
        # The key of AOTAutograd's cache lacks the alignment of inputs, so the cache may return a kernel that needs
        # aligned memory. Inductor's own cache stays on, because its key has the alignment.
        with torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
            compiled = compile_fx(GraphModule({}, elements), examples)
        return Update(GraphModule({}, _graph_of_scalars(parts)), compiled)


# Recording ----------------------------------------------------------------------------------------------------------


class _Range(torch.nn.Module):
    """What an optimizer does to a range of elements, as a module that ``torch.export`` records."""

    def __init__(self, worker, settings, names):
        super().__init__()
        # `capturable` keeps counts of steps in tensors. The other two would record operators that cannot be fused.
        fixed = {"capturable": True, "foreach": False, "fused": False}
        self.settings = {**worker.defaults, **settings, **fixed}
        self.worker, self.names = worker, names

    def forward(self, gradient, factor, master, new, states, learning_rate, scalars):
        worker = self.worker
        worker.param_groups = [{**self.settings, "lr": learning_rate, "params": [master]}]
        worker.state = {master: dict(zip(self.names, [*states, *scalars], strict=True))}
        gradient = gradient.to(master.dtype)
        master.grad = gradient if factor is None else gradient * factor
        before = master.clone()
        worker.step()
        if isinstance(worker, torch.optim.Adam):
            # With `capturable`, Adam divides by the learning rate, so a rate of zero makes NaN where moments are zero.
            master.copy_(torch.where(learning_rate.abs() <= LEAST_RATE, before, master))
        new.copy_(master)


def class_of_torch(inner: torch.optim.Optimizer) -> Type[torch.optim.Optimizer]:
    """Returns torch's class whose update is that of ``inner``, which may be one of DeepSpeed in C++."""
    if isinstance(inner, (FusedAdam, DeepSpeedCPUAdam)):
        return torch.optim.AdamW if inner.adam_w_mode else torch.optim.Adam
    return type(inner)


def _worker(optimizer):
    """Returns a new optimizer with the update of ``optimizer``.

    A copy would share parameter groups and states with ``optimizer``, and torch's ``__setstate__()`` changes them.
    """
    return class_of_torch(optimizer)([torch.nn.Parameter(torch.empty(0, device="cpu"))])


def _record(module, master, states, learning_rate, scalars, kind) -> ExportedProgram:
    """Records how a :class:`_Range` changes its inputs, without changes in place."""
    new = torch.empty_like(master, dtype=kind.new)
    if not kind.aligned:
        # On a GPU, Inductor copies inputs that are less aligned than the example, and copies them back.
        new = new.new_empty(1 + new.numel())[1:].view_as(new)
    inputs = (
        torch.empty_like(master, dtype=kind.gradient),
        master.new_empty(1) if kind.scaled else None,
        master,
        new,
        states,
        learning_rate,
        scalars,
    )
    rows = {0: Dim("rows", min=2)}
    shapes = (rows, None, rows, rows, [rows] * len(states), None, [None] * len(scalars))
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False).run_decompositions({})
    _keep_scalars_as_tensors(program.graph)
    return program


def _keep_scalars_as_tensors(graph):
    """Replaces factors that a record reads out of a scalar tensor. To read one, the host would wait for the device."""
    aten = torch.ops.aten
    for item in graph.find_nodes(op="call_function", target=aten.item.default):
        (scalar,) = item.args
        for user in [*item.users]:
            with graph.inserting_before(user):
                if user.target is aten.add.Tensor and user.kwargs == {"alpha": item}:
                    old, change = user.args
                elif user.target is aten.addcdiv.default and user.kwargs == {"value": item}:
                    old, *quotient = user.args
                    change = graph.call_function(aten.div.Tensor, tuple(quotient))
                else:
                    raise RuntimeError(f"the optimizer's step reads a number for {user.target} out of a tensor")
                product = graph.call_function(aten.mul.Tensor, (change, scalar))
            # The user keeps its name, by which the program finds the new values.
            user.target, user.args, user.kwargs = aten.add.Tensor, (old, product), {}
        graph.erase_node(item)


# Cutting ------------------------------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """The nodes of a recorded update, each list in the order of the graph."""

    given_scalars: List[Node]  # the placeholders of scalars
    given_elements: List[Node]  # the other placeholders
    scalars: List[Node]  # what depends on scalars alone
    elements: List[Node]  # the other calls
    taken: List[Node]  # the scalars that the other calls use
    new: Dict[Node, Node]  # a placeholder -> its new value. One whose value stays is missing.


def _cut(program: ExportedProgram) -> _Parts:
    """Says of each node of a record whether it is of the scalars or of the elements."""
    placeholders = program.graph.find_nodes(op="placeholder")
    given_scalars = [node for node in placeholders if _is_scalar(node)]
    # The factor is None if gradients are not scaled.
    given_elements = [node for node in placeholders if node not in given_scalars and node.meta["val"] is not None]
    scalars: List[Node] = []
    elements: List[Node] = []
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not torch.ops.aten._assert_tensor_metadata.default:
            (scalars if _is_scalar(node) and all(map(_is_scalar, node.all_input_nodes)) else elements).append(node)
    taken = [node for node in (*given_scalars, *scalars) if any(user in elements for user in node.users)]
    named = {node.name: node for node in program.graph.nodes}
    changes = [spec for spec in program.graph_signature.output_specs if spec.target is not None]
    new = {named[spec.target]: named[spec.arg.name] for spec in changes}
    return _Parts(given_scalars, given_elements, scalars, elements, taken, new)


def _graph_of_scalars(parts: _Parts) -> Graph:
    """Returns the graph of ``Update.scalars``."""
    graph, values = Graph(), {}
    for node in parts.given_scalars:
        values[node] = graph.placeholder(node.name)
    for node in parts.scalars:
        values[node] = graph.node_copy(node, values.__getitem__)
    # The first one is the learning rate, and the others are states.
    new_states = [values[parts.new.get(node, node)] for node in parts.given_scalars[1:]]
    # In fp32, because the pass would convert an fp64 scalar anew for each element.
    cast = torch.ops.aten.to.dtype
    for_elements = [graph.call_function(cast, (values[node], _in_fp32(node).dtype)) for node in parts.taken]
    graph.output((*new_states, *for_elements))
    return graph


def _graph_of_elements(parts: _Parts) -> Tuple[Graph, List[torch.Tensor]]:
    """Returns the graph of ``Update.elements``, and examples of its inputs."""
    # The caller moves scalars to the elements' device. The kernel would read those on the host anew for each range.
    device = parts.given_elements[0].meta["val"].device
    examples = [node.meta["val"] for node in parts.given_elements] + [
        _in_fp32(node).to(device) for node in parts.taken
    ]
    graph, values = Graph(), {}
    for node in (*parts.given_elements, *parts.taken):
        values[node] = graph.placeholder(node.name)
    for node in parts.elements:
        values[node] = graph.node_copy(node, values.__getitem__)
    for node in parts.given_elements:
        if node in parts.new:
            graph.call_function(torch.ops.aten.copy_.default, (values[node], values[parts.new[node]]))
    graph.output(())
    return graph, examples


def _is_scalar(node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _in_fp32(node):
    value = node.meta["val"]
    return value.float() if value.is_floating_point() else value
