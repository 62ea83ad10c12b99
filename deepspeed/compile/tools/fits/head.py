# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of a head and its loss in the form that the part ``loss`` gives them: in chunks, or in their own graphs.

The part itself decides which, of the graph of what is around the blocks.
"""

import copy
import operator
from typing import Any, Callable, NamedTuple, Optional, Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...features.loss.chunked_loss import chunks
from ...features.loss.find_loss import ChunkedLosses
from ...features.loss.own_graph import split_loss
from ...zero_1_and_2.graph.parameter_numbers import ParameterNumbers
from .graphs import TracedGraphs
from .liveness import Moment, bytes_of

_FP32 = 4


class Form(NamedTuple):
    """The form of a head and its loss in training."""

    is_chunked: bool = False  # whether the loss is computed in chunks
    is_cut: bool = False  # whether the loss has a graph of its own
    unused: int = 0  # bytes of zeros that autograd passes for other results than the loss, if the graph is not cut


class Recorder(TorchFunctionMode):
    """Records calls of torch's functions as the graph that Dynamo would make of them."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        super().__init__()
        self.graph, self._nodes = Graph(), {}
        self.inputs = []
        for tensor in tensors:
            self.node_of(tensor)

    def node_of(self, tensor: torch.Tensor) -> Node:
        """Returns the node of a tensor, which is an input of the graph if nothing has recorded how it was made."""
        if id(tensor) not in self._nodes:
            inputs = self.graph.find_nodes(op="placeholder")
            with self.graph.inserting_after(inputs[-1]) if inputs else self.graph.inserting_before():
                self._note(self.graph.placeholder(f"input_{len(inputs)}"), tensor)
            self.inputs.append(tensor)
        return self._nodes[id(tensor)]

    def _note(self, node, tensor):
        node.meta["example_value"], self._nodes[id(tensor)] = tensor, node

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.__name__
        made = list(result) if isinstance(result, (tuple, list)) else [result]
        if not any(isinstance(value, torch.Tensor) for value in made) and name not in (
            "__setitem__",
            "_set_grad_enabled",
        ):
            return result
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
        if name == "__get__":
            node = self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        elif name.startswith("__r") and hasattr(operator, f"__{name[3:]}"):
            node = self.graph.call_function(getattr(operator, f"__{name[3:]}"), args[::-1])
        elif name.startswith("__") and hasattr(operator, name):
            node = self.graph.call_function(getattr(operator, name), args)
        elif getattr(torch.Tensor, name, None) is func:
            node = self.graph.call_method(name, args, kwargs)
        else:
            node = self.graph.call_function(func, args, kwargs)
        if isinstance(result, torch.Tensor):
            self._note(node, result)
        else:
            for index, value in enumerate(made):
                if isinstance(value, torch.Tensor):
                    self._note(self.graph.call_function(operator.getitem, (node, index)), value)
        return result

    def finish(self, results: Sequence[torch.Tensor]) -> GraphModule:
        """Returns the graph, which returns these results."""
        self.graph.output(tuple(map(self.node_of, results)))
        return GraphModule({}, self.graph)


def form_of(
    call: Callable[..., Any],
    loss_of: Callable[[Any], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    chunked_loss: Optional[bool],
) -> Form:
    """Asks the part ``loss`` for the form of a model's head and loss.

    Args:
        call: the code around the blocks: takes parameters and other tensors, and returns the model's results.
        parameters, tensors: fake tensors.
    """
    # Copy the tensors: nodes of a graph refer to each other, and would keep the counted tensors until Python collects
    # garbage.
    tensors = [torch.empty_like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]
    recorder = Recorder((*parameters, *tensors))
    with recorder:
        result = call(*parameters, *tensors)
        loss = loss_of(result)
    returned = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not any(tensor is loss for tensor in returned):
        # The caller computes the loss from the model's results.
        return Form()
    gm = recorder.finish(returned)
    trained = ParameterNumbers(0, [parameter for parameter in parameters if parameter.requires_grad])
    if ChunkedLosses(chunked_loss).cut_out(gm, recorder.inputs, trained, lambda part: part) is not None:
        return Form(is_chunked=True, is_cut=True)
    if split_loss(gm, [value in trained for value in recorder.inputs]) is not None:
        return Form(is_cut=True)
    return Form(unused=sum(bytes_of(tensor) for tensor in returned if tensor.requires_grad and tensor is not loss))


def with_form(graphs: TracedGraphs, form: Form) -> TracedGraphs:
    """Gives the graphs around the blocks the backward of a training."""
    if not graphs.backward or not (form.is_chunked or form.unused):
        return graphs
    graphs = copy.copy(graphs)
    if form.is_chunked:
        graphs.backward = _in_chunks(graphs)
    else:
        # Autograd passes zeros for the gradients of unused results.
        graphs.backward = [
            moment._replace(most=moment.most + form.unused, after=moment.after + form.unused)
            for moment in graphs.backward
        ]
        graphs.backward[-1] = graphs.backward[-1]._replace(after=graphs.backward[-1].after - form.unused)
    return graphs


def _in_chunks(graphs):
    """Returns the life of the backward in ``loss/chunked_loss.py``."""
    product = graphs.product
    hidden, rows = product.rows * product.inner, chunks(product.rows, product.columns)[0]
    chunk = product.rows * (rows.stop - rows.start) * product.element_size
    is_trained = any(moment.gradient == product.parameter for moment in graphs.backward)
    weight = product.inner * product.columns * product.element_size if is_trained else 0
    # The sum over chunks is in fp32. Behind the last chunk it is copied in the dtype of the hidden states.
    most = max(chunk, product.element_size * hidden) + _FP32 * hidden + weight
    rest = [moment._replace(most=min(moment.most, most)) for moment in graphs.backward if moment.gradient is not None]
    rest = [moment for moment in rest if moment.gradient != product.parameter]
    complete = Moment(most, _FP32 * hidden, product.parameter if is_trained else None)
    return [complete, *rest, Moment(_FP32 * hidden, -sum(saved.bytes for saved in graphs.saved))]
