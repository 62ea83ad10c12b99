# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Compiles an optimizer's update of a range of elements into one pass over memory.

The pass reads a gradient in its own dtype, scales it, updates master weights and optimizer states, and writes the new
parameters. The update is the optimizer's own: ``torch.export`` records what ``optimizer.step()`` does to a range, and
Inductor compiles the record. Whatever depends on scalars alone, such as Adam's bias corrections, is computed once a
step, in fp64 and outside of the pass.
"""

import copy
import warnings
from typing import Any, Callable, Dict, NamedTuple, Optional

import torch
from torch.export import Dim
from torch.fx import Graph, GraphModule

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.utils import logger

from .messages import inform, warn

# A range has a multiple of so many elements, so that the kernel reads and writes 16 bytes at a time in every dtype.
ALIGN_NUMEL = 16
# With fewer elements, a step saves less time than compiling takes in any training.
LEAST_NUMEL = 2**24
# As many as torch by default compiles of one function.
MAX_UPDATES = 8


class Update(NamedTuple):
    """The compiled update of all parameter groups whose settings but the learning rate are equal."""

    scalars: Callable  # (learning rate, scalar states) -> (new scalar states, fp32 scalars for `elements`)
    elements: Callable  # (gradient, factor, master, new, per-element states, scalars), changes master, new and states


class CompiledUpdates:
    """The compiled updates of one engine."""

    def __init__(self):
        self._updates: Dict[str, Optional[Update]] = {}
        self._has_warned = False

    def begin(
        self, optimizer: torch.optim.Optimizer, index: int, gradient: torch.dtype, new: torch.dtype, scaled: bool
    ) -> Optional["StepOfGroup"]:
        """Begins a step of the only parameter of ``optimizer.param_groups[index]``.

        Args:
            optimizer: an optimizer for which ``may_step_in_chunks()`` is true.
            index: the index of the parameter group.
            gradient: the dtype of gradients.
            new: the dtype in which to write the new values of parameters.
            scaled: whether gradients are multiplied by a factor.

        Returns:
            None if the optimizer has to step this parameter itself: in its first step, in which it makes its states;
            if the parameter has fewer than ``LEAST_NUMEL`` elements or is not in fp32; or if the update cannot be
            compiled.
        """
        group = optimizer.param_groups[index]
        (master,) = group["params"]
        state = optimizer.state.get(master) or {}
        if master.numel() < LEAST_NUMEL or master.dtype != torch.float32 or not _is_known(optimizer, group, state):
            return None
        if has_fast_kernel(optimizer, group, master):
            return None
        settings = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        # StepOfGroup passes states in their order, so names count as well as dtypes.
        states = {name: value.dtype if is_per_element(value, master) else None for name, value in state.items()}
        key = repr((type(optimizer), settings, states, gradient, new, scaled, master.device))
        if key not in self._updates:
            if len(self._updates) == MAX_UPDATES:
                self._warn_once(optimizer)
                return None
            self._updates[key] = _make(optimizer, settings, state, master, gradient, new, scaled)
        update = self._updates[key]
        return update and StepOfGroup(update, group, master, state)

    def _warn_once(self, optimizer):
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"DeepCompile has compiled {MAX_UPDATES} updates of {type(optimizer).__name__} and compiles no more: "
                "parameter groups differ, or change between steps, in other settings than the learning rate"
            )


class StepOfGroup:
    """One step of one parameter group, made range by range.

    Args:
        update: the compiled update.
        group: the parameter group.
        master: its only parameter.
        state: the optimizer's state of ``master``.
    """

    def __init__(self, update: Update, group: Dict[str, Any], master: torch.nn.Parameter, state: Dict[str, Any]):
        self._update, self._master, self._state = update, master.data, state
        self._per_element = [value for value in state.values() if is_per_element(value, master)]
        self._names = [name for name, value in state.items() if not is_per_element(value, master)]
        values = _scalars(group["lr"], [state[name] for name in self._names])
        results = update.scalars(*values)
        self._new_scalars, scalars = results[: len(self._names)], results[len(self._names) :]
        if values[0].device != master.device:
            # These scalars are on the host, so reading them does not wait for the device.
            scalars = [torch.full((), each.item(), dtype=each.dtype, device=master.device) for each in scalars]
        self._scalars = scalars

    def run(self, gradient: torch.Tensor, factor: Optional[torch.Tensor], new: torch.Tensor, first: int) -> None:
        """Steps the elements from ``first`` on, as many as ``gradient`` has, and writes them into ``new``.

        With offloading ``new`` may be the memory of ``gradient``: the pass reads each element before it writes it.

        Args:
            gradient: 1-D, with a multiple of ``ALIGN_NUMEL`` elements, beginning at a multiple of 16 bytes.
            factor: an fp32 tensor [1] with which to multiply the gradient. None without ``scaled``.
            new: 1-D, as many elements.
            first: a multiple of ``ALIGN_NUMEL``.
        """
        span = slice(first, first + gradient.numel())
        states = [_rows(value[span]) for value in self._per_element]
        factors = [] if factor is None else [factor]
        self._update.elements(
            _rows(gradient), *factors, _rows(self._master[span]), _rows(new), *states, *self._scalars
        )

    def finish(self) -> None:
        """Writes the new scalar states, such as the count of steps. Called when all ranges are stepped."""
        for name, value in zip(self._names, self._new_scalars, strict=True):
            if torch.is_tensor(self._state[name]):
                self._state[name].copy_(value)
            else:
                self._state[name] = type(self._state[name])(value.item())


def _rows(range_of_elements):
    """Views a range as [rows, ALIGN_NUMEL], because the number of rows may be any, and the kernel knows the other."""
    return range_of_elements.view(-1, ALIGN_NUMEL)


def is_per_element(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state of an optimizer has a value for each element of a parameter."""
    return torch.is_tensor(value) and value.shape == parameter.shape


def has_fast_kernel(optimizer: torch.optim.Optimizer, group: Dict[str, Any], master: torch.Tensor) -> bool:
    """Whether an optimizer's own kernel is faster than a compiled pass, as those made by hand for CPUs are."""
    return master.is_cpu and (isinstance(optimizer, DeepSpeedCPUAdam) or bool(group.get("fused")))


def _is_known(optimizer, group, state):
    """Whether the update can be recorded, and states are of a kind that :class:`StepOfGroup` knows."""
    if group.get("differentiable") or not group.get("bias_correction", True):
        return False
    # A tensor among the settings would be recorded with the value that it has now.
    if any(torch.is_tensor(each) for name, value in group.items() if name != "params" for each in _flat(name, value)):
        return False
    (master,) = group["params"]
    scalars = [value for value in state.values() if not is_per_element(value, master)]
    kinds = all(isinstance(value, (int, float)) or (torch.is_tensor(value) and value.dim() == 0) for value in scalars)
    # Only the first step of an optimizer without momentum has no state after it, too.
    return kinds and (bool(state) or type(optimizer) is torch.optim.SGD and not group["momentum"])


def _flat(name, value):
    """Lists the values of a setting. The learning rate may be a tensor without dimensions."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in values if not (name == "lr" and torch.is_tensor(each) and each.dim() == 0)]


def _scalars(learning_rate, states):
    """Returns the learning rate and scalar states as fp64 tensors [], all on the device of the states."""
    device = next((value.device for value in states if torch.is_tensor(value)), "cpu")
    return [torch.as_tensor(value, dtype=torch.float64, device=device).clone() for value in (learning_rate, *states)]


# Recording and compiling --------------------------------------------------------------------------------------------


def _make(optimizer, settings, state, master, gradient, new, scaled):
    """Returns the :class:`Update`, or None with a warning if it cannot be compiled."""
    inform(f"DeepCompile compiles the update of {type(optimizer).__name__}")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # Torch 2.13 warns of a name that torch.export itself still uses.
            warnings.simplefilter("ignore", FutureWarning)
            return _compile(_record(optimizer, settings, state, master, gradient, new, scaled))
    except Exception as error:
        # Other ranks may be able to.
        logger.warning(
            f"DeepCompile cannot compile the update of {type(optimizer).__name__}, so a step takes several passes "
            f"over memory ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        )
        return None


class _Range(torch.nn.Module):
    """What an optimizer does to a range of elements, as a module that ``torch.export`` records."""

    def __init__(self, optimizer, settings, names):
        super().__init__()
        self.optimizer, self.settings, self.names = optimizer, settings, names

    def forward(self, gradient, factor, master, new, states, scalars):
        learning_rate, *scalars = scalars
        worker = copy.copy(self.optimizer)
        worker.param_groups = [{**self.settings, "lr": learning_rate, "params": [master]}]
        worker.state = {master: dict(zip(self.names, [*states, *scalars], strict=True))}
        gradient = gradient.to(master.dtype)
        master.grad = gradient if factor is None else gradient * factor
        worker.step()
        new.copy_(master)


def _record(optimizer, settings, state, master, gradient, new, scaled):
    """Returns an exported program: how a :class:`_Range` changes its inputs, without changes in place."""
    names = sorted(state, key=lambda name: not is_per_element(state[name], master))
    states = [_rows(state[name][:LEAST_NUMEL]) for name in names if is_per_element(state[name], master)]
    scalars = _scalars(0.0, [state[name] for name in names[len(states) :]])
    # With a learning rate that requires grad, SGD multiplies by a tensor, where it would read a number otherwise.
    scalars[0].requires_grad_()
    span = _rows(master.data[:LEAST_NUMEL])
    inputs = (
        span.new_empty(span.shape, dtype=gradient),
        span.new_empty(1) if scaled else None,
        span,
        span.new_empty(span.shape, dtype=new),
        states,
        scalars,
    )
    rows = {0: Dim("rows", min=2)}
    worker = _as_torch(optimizer)
    # `capturable` keeps counts of steps in tensors. The other two would record operators that cannot be fused.
    settings = {**worker.param_groups[0], **settings, "capturable": True, "foreach": False, "fused": False}
    return torch.export.export(
        _Range(worker, settings, names),
        inputs,
        dynamic_shapes=(rows, None, rows, rows, [rows] * len(states), [None] * len(scalars)),
        strict=False,
    ).run_decompositions({})


def _as_torch(stepper):
    """Returns the optimizer of torch whose update is that of ``stepper``, which may be one of DeepSpeed in C++."""
    if isinstance(stepper, (FusedAdam, DeepSpeedCPUAdam)):
        cls = torch.optim.AdamW if stepper.adam_w_mode else torch.optim.Adam
        return cls([torch.nn.Parameter(torch.empty(0))])
    return stepper


def _compile(program):
    """Cuts a program into its scalars, which run as they are, and its elements, which Inductor compiles."""
    # No function of torch's own compiles a graph for inputs of varying length without Dynamo's guards in each call.
    from torch._inductor.compile_fx import compile_fx

    placeholders = program.graph.find_nodes(op="placeholder")
    changed = {
        spec.target: next(node for node in program.graph.nodes if node.name == spec.arg.name)
        for spec in program.graph_signature.output_specs
        if spec.target is not None
    }
    scalars, elements = [], []
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not torch.ops.aten._assert_tensor_metadata.default:
            (scalars if _is_scalar(node) and all(map(_is_scalar, node.all_input_nodes)) else elements).append(node)
    given = [node for node in placeholders if _is_scalar(node)]
    taken = [node for node in (*given, *scalars) if any(user in elements for user in node.users)]
    of_scalars, values = Graph(), {}
    for node in given:
        values[node] = of_scalars.placeholder(node.name)
    for node in scalars:
        values[node] = of_scalars.node_copy(node, values.__getitem__)
    new_states = [values[changed.get(node.name, node)] for node in given[1:]]
    # In fp32, because the pass would convert an fp64 scalar anew for each element.
    cast = torch.ops.aten.to.dtype
    for_elements = [of_scalars.call_function(cast, (values[node], _in_fp32(node).dtype)) for node in taken]
    of_scalars.output((*new_states, *for_elements))
    # StepOfGroup puts scalars there, because a kernel's scalars on the host would be read anew for each range.
    device = program.graph.find_nodes(op="placeholder")[0].meta["val"].device
    of_elements, values, examples = Graph(), {}, []
    for node in (*(node for node in placeholders if node not in given and node.meta["val"] is not None), *taken):
        values[node] = of_elements.placeholder(node.name)
        examples.append(_in_fp32(node).to(device) if node in taken else node.meta["val"])
    for node in elements:
        values[node] = of_elements.node_copy(node, values.__getitem__)
    for node in placeholders:
        if node in values and node.name in changed:
            of_elements.call_function(torch.ops.aten.copy_.default, (values[node], values[changed[node.name]]))
    of_elements.output(())
    return Update(GraphModule({}, of_scalars), compile_fx(GraphModule({}, of_elements), examples))


def _is_scalar(node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _in_fp32(node):
    value = node.meta["val"]
    return value.float() if value.is_floating_point() else value
