# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Finds the head and the cross-entropy of a language model in a graph, and puts a :class:`ChunkedLoss` in their place.

The pattern is that of transformers' language models: ``logits = linear(hidden, weight)``, which may be scaled and
capped by a hyperbolic tangent; casts, reshapes and slices of the logits that keep the vocabulary as the last
dimension; ``cross_entropy`` of the result.
"""

import inspect
import operator
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.fx.passes.split_module import split_module

from ...zero_1_and_2.graph.parameter_numbers import ParameterNumbers
from ...zero_1_and_2.messages import warn
from .chunked_loss import ChunkedLoss, LossOfLogits
from .own_graph import changes_in_place, split_loss, traced_tensor

# From so many logits on, 2 GiB in bf16, chunks are the default. The gradient of fewer logits is a small part of the
# memory of a step, and their chunks are small matrix multiplications, which take longer.
MANY_LOGITS = 2**30

_CROSS_ENTROPY = inspect.signature(torch.nn.functional.cross_entropy)
# Written here, because torch's function is native and has no signature.
_LINEAR = inspect.signature(lambda input, weight, bias=None: None)
_SCALES = {"mul", "truediv", "div"}
_CASTS = {"float", "to", "contiguous"}
_RESHAPES = {"view", "reshape", "flatten"}
_CONTEXTS = {
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
}


class Unfit(Exception):
    """The reason why a graph's loss cannot be computed in chunks. The text follows on "because"."""


class Found(NamedTuple):
    """A head and its loss."""

    head: Node  # the node of the linear layer
    # hidden, weight, bias: the head's inputs. Without a bias, None.
    hidden: Node
    weight: Node
    bias: Optional[Node]
    scaling: Sequence[Node]  # the nodes that scale and cap the head's output, the last one first
    logits: Node  # the last node of ``scaling``, or the head without any
    cross_entropy: Node  # the node that makes the loss
    target: Node  # the cross-entropy's targets
    loss: LossOfLogits  # how the loss depends on the logits
    between: Sequence[Node]  # the nodes that lead from the logits to the loss, the last one first


class ChunkedLosses:
    """Makes an engine's graphs compute their losses in chunks.

    Attributes:
        is_answered: whether a loss is computed in chunks, or a warning has said why none is.
    """

    def __init__(self, wanted: Optional[bool]):
        self._wanted = wanted
        self._has_warned = self.is_answered = False

    def cut_out(
        self,
        gm: GraphModule,
        example_inputs: Sequence,
        numbers: ParameterNumbers,
        compile_part: Callable[[Callable], Callable],
    ) -> Optional[GraphModule]:
        """Puts a :class:`ChunkedLoss` between two parts of a graph, if its loss can and shall be computed in chunks.

        Args:
            gm: a graph for training, as Dynamo traced it. It is not changed.
            compile_part: compiles a function of tensors.

        Returns:
            A module that calls its submodules ``HEAD`` and ``REST`` of ``own_graph``, and the :class:`ChunkedLoss` in
            between. A submodule without nodes is missing. None if the loss is not computed in chunks.
        """
        if self._wanted is False:
            return None
        placeholders = gm.graph.find_nodes(op="placeholder")
        values = dict(zip(placeholders, example_inputs, strict=True))
        is_registered = [value in numbers for value in example_inputs]
        parameters = {node for node, flag in zip(placeholders, is_registered) if flag}
        found, unfit = _find(gm.graph, parameters)
        may_warn = unfit and self._wanted and not self._has_warned
        if may_warn and (_losses(gm.graph) or split_loss(gm, is_registered)):
            self._has_warned = self.is_answered = True
            warn(
                f"compile.chunked_loss=True has no effect on a loss of this model, because {unfit}; it is computed in "
                "one piece"
            )
        # Ask for the traced size, not its hint: with lengths that vary, the answer becomes a guard of the graph.
        if found is None or not (self._wanted or guard_or_false(_traced(found.head).numel() >= MANY_LOGITS)):
            return None
        self.is_answered = True
        reduced = [values.get(node) in numbers for node in (found.weight, found.bias)]
        return _replaced(gm, found, ChunkedLoss(found.loss, reduced, numbers, compile_part))


def _traced(node: Any) -> torch.Tensor:
    value = traced_tensor(node) if isinstance(node, Node) else None
    if value is None:
        raise Unfit("torch does not know the shape of the input of its loss")
    return value


def _arguments(signature, node):
    bound = signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _losses(graph):
    return graph.find_nodes(op="call_function", target=torch.nn.functional.cross_entropy)


def _find(graph, parameters):
    """Returns the fitting loss with the most logits (the last of equals) or None, and why another one does not fit."""
    found, unfit = [], None
    for cross_entropy in _losses(graph):
        try:
            loss = _with_head(cross_entropy)
            _require_movable(graph, loss, parameters)
            found.append(loss)
        except Unfit as reason:
            unfit = reason
    if not found:
        return None, unfit or Unfit("it does not call torch.nn.functional.cross_entropy")
    return max(reversed(found), key=lambda loss: _traced(loss.head).numel()), unfit


def _with_head(cross_entropy):
    arguments = _arguments(_CROSS_ENTROPY, cross_entropy)
    mean = arguments["reduction"] == "mean"
    plain = arguments["weight"] is arguments["size_average"] is arguments["reduce"] is None
    if not (plain and arguments["label_smoothing"] == 0 and (mean or arguments["reduction"] == "sum")):
        raise Unfit("its cross_entropy has weights, smoothed labels, or a loss for each token")
    if not isinstance(arguments["ignore_index"], int):
        raise Unfit("the ignore_index of its cross_entropy changes between calls")
    source, target = _traced(arguments["input"]), _traced(arguments["target"])
    if source.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        raise Unfit("its cross_entropy is not one of logits [tokens, vocabulary] and targets [tokens]")
    logits, between, kept = _logits_of(arguments["input"])
    head, scaling, scale, cap = _head_of(logits)
    hidden, weight, bias = _arguments(_LINEAR, head).values()
    made = _traced(head)
    same = {made.dtype, _traced(logits).dtype, _traced(hidden).dtype, _traced(weight).dtype}
    # Under autocast, the head casts its inputs.
    if len(same) > 1 or not made.requires_grad or made._version:
        raise Unfit("its head casts, needs no gradient, or makes logits that are changed in place")
    loss = LossOfLogits(arguments["ignore_index"], mean, _traced(cross_entropy).dtype, kept, scale, cap)
    return Found(head, hidden, weight, bias, scaling, logits, cross_entropy, arguments["target"], loss, between)


def _logits_of(node) -> Tuple[Node, List[Node], List[Tuple]]:
    """Follows a loss's input back to the logits; returns the logits, the nodes between, and the indices that drop
    tokens there."""
    between, kept, vocabulary = [], [], _traced(node).shape[-1]
    while node.target is not torch._C._nn.linear and _name(node) not in {*_SCALES, "tanh"}:
        source = node.args[0] if node.args else None
        before, after = _traced(source), _traced(node)
        name = _name(node)
        is_slice = name == "getitem" and _keeps_vocabulary(node.args[1])
        # `kept` has indices of the head's dimensions, so no reshape may come between the head and a slice.
        if not (is_slice or name in _CASTS or (name in _RESHAPES and not kept)):
            raise Unfit(f"`{name}` is called between its head and its cross_entropy")
        if is_slice:
            kept.insert(0, node.args[1])
        if before.shape[-1] != vocabulary or after.dtype not in (torch.float32, before.dtype):
            raise Unfit(f"`{name}` between its head and its cross_entropy changes the vocabulary or rounds")
        between.append(node)
        node = source
    return node, between, kept


def _head_of(logits) -> Tuple[Node, List[Node], float, Optional[float]]:
    """Follows logits back to the head; returns the head, the nodes between, and scale and cap of a
    :class:`LossOfLogits`."""
    node, scaling, scale, cap = logits, [], 1.0, None
    while node.target is not torch._C._nn.linear:
        name, operands = _name(node), [*node.args, *node.kwargs.values()]
        if name == "mul" and len(operands) == 2 and isinstance(operands[1], Node):
            operands.reverse()
        number: Any = operands[1] if name in _SCALES and len(operands) == 2 else None
        is_scale = type(number) in (int, float) and number != 0
        is_cap = name == "tanh" and cap is None
        source = operands[0] if operands else None
        if scaling and name not in {*_SCALES, "tanh"}:
            raise Unfit(f"`{name}` is called before its logits are scaled")
        if not (is_scale or is_cap) or not isinstance(source, Node):
            raise Unfit(f"`{name}` is called between its head and its cross_entropy")
        if len(source.users) > 1:
            raise Unfit("the head's output is also used unscaled")
        if is_cap:
            # The scale that was found so far comes after the tanh.
            scale, cap = 1.0, scale
        else:
            scale *= number if name == "mul" else 1 / number
        scaling.append(node)
        node = source
    return node, scaling, scale, cap


def _name(node):
    """Returns the name of the function or method that a node between head and loss calls."""
    if node.op == "placeholder":
        raise Unfit("torch compiles its head and its cross_entropy apart from one another")
    return node.target if node.op == "call_method" else getattr(node.target, "__name__", "")


def _keeps_vocabulary(index):
    """Whether an index consists of ``...`` and slices with constant bounds, and the last of them, if any, is ``:``."""
    return (
        isinstance(index, tuple)
        and index[-1:] in ((), (slice(None),))
        and all(part is Ellipsis or _is_constant_slice(part) for part in index)
    )


def _is_constant_slice(part):
    return isinstance(part, slice) and not any(isinstance(bound, Node) for bound in (part.start, part.stop, part.step))


def _behind(head) -> Set[Node]:
    """Returns the head and the nodes that need the logits."""
    behind, open_ = set(), [head]
    while open_:
        node = open_.pop()
        if node not in behind:
            behind.add(node)
            open_ += node.users
    return behind


def _require_movable(graph, found, parameters):
    """Raises Unfit unless nodes without the logits can run before the head, and all others after the cross-entropy."""
    behind = _behind(found.head)
    if found.target in behind:
        raise Unfit("the targets of its cross_entropy depend on the logits")
    nodes = list(graph.nodes)
    for node in nodes[nodes.index(found.head) + 1 :]:
        if node.op == "output":
            continue
        if changes_in_place(node) or node.target in _CONTEXTS:
            raise Unfit("something is changed in place, or autocast or gradients are switched, after its head")
        if node in behind and parameters.intersection(node.all_input_nodes):
            raise Unfit("parameters are used after its head")


def _replaced(gm, found, chunked):
    graph, copies, behind = Graph(), {}, _behind(found.head)
    replaced = {found.head, *found.scaling, found.cross_entropy}
    nodes = [node for node in gm.graph.nodes if node not in replaced]
    needs_logits = {node for node in nodes if node in behind or node.op == "output"}
    for node in nodes:
        if node not in needs_logits:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    before = set(graph.nodes)
    operands = [copies.get(node) for node in (found.hidden, found.weight, found.bias, found.target)]
    call = graph.call_function(chunked.loss_and_logits, tuple(operands))
    copies[found.cross_entropy] = graph.call_function(operator.getitem, (call, 0))
    copies[found.logits] = graph.call_function(operator.getitem, (call, 1))
    middle = set(graph.nodes) - before
    for node in nodes:
        if node in needs_logits:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in found.between:
        # Erase casts and reshapes that only the loss needed.
        if not copies[node].users:
            graph.erase_node(copies[node])
    # The numbers 0 and 1 are HEAD and REST of own_graph.
    return split_module(GraphModule(gm, graph), gm, lambda node: 0 if node in before else 2 if node in middle else 1)
