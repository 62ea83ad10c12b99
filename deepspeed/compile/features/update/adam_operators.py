# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Adam over rows of elements in torch's operators, and the arguments of a step.

:func:`step_rows` runs operator by operator. :func:`compile_step` compiles it to one pass over memory.
"""

from typing import Callable, NamedTuple, Tuple

import torch
from torch.export import Dim

from .dynamic_map import Map, decode, encode
from .remainders import join, split

# Rows of the example with which a pass is compiled. The pass takes any number of rows, but Inductor uses threads only
# where the example has work for them. Nothing is written to the example, so it takes no memory of the host.
_EXAMPLE_ROWS = 2**20


class Elements(NamedTuple):
    """Rows of a partition. Tensors but scales are [rows, columns]. A step changes all of them but the gradient."""

    gradient: torch.Tensor  # in any dtype
    master: torch.Tensor  # fp32, or int16: remainders of the parameters in `new` (`remainders.py`)
    # The memory for the new parameters, in any dtype. The gradient may lie there too. With remainders it is bf16 and
    # holds the parameters.
    new: torch.Tensor
    # exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq. In fp32, or two of them as codes in uint8.
    states: Tuple[torch.Tensor, ...]
    scales: Tuple[torch.Tensor, ...] = ()  # of codes, each fp32 [rows]; a row is a block. Empty: states are in fp32.


class Scalars(NamedTuple):
    """The numbers of one step of a parameter group, or the entries of an fp32 tensor of them."""

    factor: float  # multiplies gradients. Negative to go up the gradient.
    decay_of_gradient: float  # weight_decay, or 0 if weight decay is decoupled
    decay: float  # rate * weight_decay if weight decay is decoupled, else 0
    weight: float  # 1 - beta1
    weight_sq: float  # 1 - beta2
    rate: float
    correction: float  # 1 - beta1**step
    root_of_correction_sq: float  # (1 - beta2**step)**0.5
    epsilon: float


class Settings(NamedTuple):
    """The settings of one step of a parameter group, the same for all elements."""

    scalars: torch.Tensor  # fp32, in the order of Scalars
    maps: Tuple[Map, ...] = ()  # of exp_avg and of exp_avg_sq. Empty: states are in fp32.


def step_rows(elements: Elements, settings: Settings) -> None:
    """Steps rows of elements.

    The arithmetic is torchao's, in its order, so that codes have the bits of torchao's optimizer on the same device.
    """
    s = Scalars(*settings.scalars.unbind())
    has_remainders = elements.master.dtype == torch.int16
    weights = join(elements.new, elements.master) if has_remainders else elements.master
    gradient = elements.gradient.to(torch.float32) * s.factor + s.decay_of_gradient * weights
    weights = weights - s.decay * weights
    mean, mean_sq, most_sq = _read_states(elements, settings)
    mean = mean + s.weight * (gradient - mean)
    mean_sq = mean_sq + s.weight_sq * (gradient * gradient - mean_sq)
    states, divisor = [mean, mean_sq], mean_sq
    if most_sq is not None:
        divisor = torch.maximum(most_sq, mean_sq)
        states.append(divisor)
    weights = weights - s.rate * (mean / s.correction) / (divisor.sqrt() / s.root_of_correction_sq + s.epsilon)
    new, master = split(weights) if has_remainders else (weights, weights)
    elements.master.copy_(master)
    elements.new.copy_(new)
    _write_states(elements, settings, states)


def _read_states(elements, settings):
    """Returns the states in fp32. The third one is None without amsgrad."""
    states = [*elements.states, None][:3]
    if elements.scales:
        states[:2] = map(
            decode, elements.states, elements.scales, (map_of_state.values for map_of_state in settings.maps)
        )
    return states


def _write_states(elements, settings, states):
    if not elements.scales:
        for state, values in zip(elements.states, states, strict=True):
            state.copy_(values)
        return
    for index, values in enumerate(states):
        codes, scales = encode(values, settings.maps[index].thresholds)
        elements.states[index].copy_(codes)
        elements.scales[index].copy_(scales)


class _Step(torch.nn.Module):
    """:func:`step_rows` as a module, which ``torch.export`` takes."""

    def forward(self, rows, scalars):
        gradient, master, new, *states = rows
        step_rows(Elements(gradient, master, new, tuple(states)), Settings(scalars))


def compile_step(like: Elements) -> Callable[[Elements, Settings], None]:
    """Returns a function that does :func:`step_rows` for states in fp32, in one pass over memory.

    Args:
        like: elements with the dtypes, the device and the columns of those to step. They are not changed.

    Raises:
        Exception: whatever torch raises if it cannot compile the pass.
    """
    # No function of torch's own compiles a graph for inputs of varying length without Dynamo's guards in each call.
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    tensors = [*like[:3], *like.states]
    rows = [tensor.new_empty(_EXAMPLE_ROWS, tensor.shape[1]) for tensor in tensors]
    scalars = like.master.new_empty(len(Scalars._fields))
    # A new parameter may lie where its gradient lies: the pass, too, reads each element before writing it.
    with torch.no_grad():
        shapes = ([{0: Dim("rows", min=2)}] * len(rows), None)
        graph = torch.export.export(_Step(), (rows, scalars), dynamic_shapes=shapes, strict=False).graph_module
        examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        # The code counts on the width of this processor's vectors, which the keys of torch's caches leave out. Where
        # hosts with other processors share a cache, the code of one would skip a half of another one's elements.
        tag = f"{torch.compiler.config.cache_key_tag} {pick_vec_isa()}"
        with torch.compiler.config.patch(cache_key_tag=tag):
            compiled = compile_fx(graph, examples)
    return lambda elements, settings: compiled(*elements[:3], *elements.states, settings.scalars)
