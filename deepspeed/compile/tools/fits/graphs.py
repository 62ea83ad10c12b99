# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Traces a function as training compiles it, and splits it with the partitioner that training uses.

All tensors are fake tensors on a CPU. Without dropout, the graph of torch's flash attention on a CPU keeps the same
tensors as on a GPU, so no GPU is needed.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule

from ...features.activation_budget.feature import split_joint
from .liveness import Life, Saved, base_of, life_of_backward, life_of_forward


class Product(NamedTuple):
    """A product of matrices [rows, inner] and [inner, columns]. The second matrix is a parameter."""

    rows: int
    inner: int
    columns: int
    element_size: int
    parameter: int  # its index among the arguments


class TracedGraphs:
    """The forward and the backward graph of a function, and the memory of both.

    Args:
        forward, backward: the graphs. Without a backward, nothing of the function is trained.
        outputs: the number of tensors that the function returns.
        parameters: the number of its arguments, the first ones, that are parameters.

    Attributes:
        outputs: fake tensors like those that the function returns.
        gradients: fake tensors like the gradients of its arguments, or None.
        product: the largest product of matrices with a parameter, or None.
        saved: the values that the forward keeps for the backward.
        forward, backward: the lives of the graphs.
    """

    def __init__(self, forward: GraphModule, backward: Optional[GraphModule], outputs: int, parameters: int):
        self.saved: List[Saved] = []
        self.forward: Life = life_of_forward(forward, outputs, self.saved)
        self.outputs = [node.meta["val"] for node in forward.graph.output_node().args[0][:outputs]]
        self.product = _largest_product(forward.graph)
        self.backward: Life = []
        self.gradients: List[Optional[torch.Tensor]] = []
        if backward is not None:
            self.backward = life_of_backward(backward, self.saved, parameters)
            self.gradients = [result and result.meta["val"] for result in backward.graph.output_node().args[0]]


def trace(
    function: Callable,
    parameters: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    budget: Optional[float],
) -> TracedGraphs:
    """Traces a function of tensors.

    Args:
        function: takes parameters and inputs, and returns a list of tensors.
        parameters, inputs: fake tensors. Those that require gradients get one.
        budget: the activations that the forward may keep, from 0 to 1; None for all.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    found: Dict[str, GraphModule] = {}

    def split(joint: GraphModule, inputs: Sequence, **kwargs: Any) -> Tuple[GraphModule, GraphModule]:
        # Inductor does the same before it splits a graph.
        with V.set_fake_mode(detect_fake_mode(inputs)):
            joint_graph_passes(joint)
        found["forward"], found["backward"] = split_joint(joint, inputs, budget, compiler="inductor", **kwargs)
        return found["forward"], found["backward"]

    def forward_compiler(graph: GraphModule, _: Sequence) -> Callable:
        found.setdefault("forward", graph)
        return graph

    compiled = aot_function(
        function,
        fw_compiler=forward_compiler,
        bw_compiler=lambda graph, _: graph,
        partition_fn=split,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with without_hooks():
        results = compiled(*map(_alike, (*parameters, *inputs)))
    return TracedGraphs(found["forward"], found.get("backward"), len(results), len(parameters))


def _largest_product(graph: Graph) -> Optional[Product]:
    inputs = graph.find_nodes(op="placeholder")
    found = []
    for operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=operator):
            left, right = node.args[-2:]
            if (base := base_of(right)) in inputs:
                (rows, inner), columns = left.meta["val"].shape, right.meta["val"].shape[1]
                size = left.meta["val"].element_size()
                found.append(Product(rows, inner, columns, size, inputs.index(base)))
    return max(found, key=lambda product: product.rows * product.columns, default=None)


def without_hooks() -> saved_tensors_hooks:
    """Returns a context without the hooks of checkpointing, which would take what runs in it for a part of a block."""
    return saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value


def _alike(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like another one, whose memory the traced graph may hold for longer than training would."""
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)
