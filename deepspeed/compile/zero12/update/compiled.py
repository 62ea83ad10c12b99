# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps ranges of an optimizer's parameter, each in one pass over memory.

The pass reads a gradient in its own dtype, scales it, updates master weights and optimizer states, and writes the new
parameters. ``recorded.py`` compiles the pass from the optimizer's own ``step()``.
"""

import itertools
from typing import Dict, Optional, Set, Tuple

import torch

from deepspeed.utils import logger

from ..messages import inform, warn
from .own_step import OwnStep, is_per_element, may_be_cut
from .ranges import ALIGN_NUMEL, PartitionGradient, end_of_range, is_aligned
from .recorded import Kind, Update, class_of_torch, compile_update
from .rule import Partition

# With fewer elements, a step saves less time than compiling takes in any training.
LEAST_NUMEL = 2**24
# Elements of the example with which an update is recorded, if the partition has as many. An update takes any number.
EXAMPLE_NUMEL = 2**24
# So many are compiled for one parameter group. A schedule of a setting would compile one in each step.
MAX_UPDATES = 3


class CompiledUpdates:
    """The compiled updates of one engine."""

    def __init__(self):
        # What an update depends on -> the update, or None if it cannot be compiled.
        self._updates: Dict[str, Optional[Update]] = {}
        # Class of an optimizer and index of a parameter group -> what its updates depend on.
        self._of_group: Dict[Tuple[type, int], Set[str]] = {}
        self._has_warned = False

    def begin(self, partition: Partition) -> Optional["CompiledStep"]:
        """Begins a step of a partition.

        Returns:
            None if ranges may not be stepped; in the optimizer's first step, in which it makes its states; if the
            partition has fewer than ``LEAST_NUMEL`` elements or its master weights are not in fp32; if the update
            cannot be compiled; or if ``MAX_UPDATES`` were compiled for the group.
        """
        optimizer, master, state, new = partition.optimizer, partition.master, partition.state, partition.new
        if (
            master.numel() < LEAST_NUMEL
            or master.dtype != torch.float32
            or not may_be_cut(partition)
            or not _is_known(partition)
        ):
            return None
        kind = Kind(partition.gradient_dtype, new.dtype, is_aligned(new), partition.factor is not None)
        settings = _settings(partition)
        # CompiledStep passes states in their order, so names count as well as dtypes.
        states = {name: value.dtype if is_per_element(value, master) else None for name, value in state.items()}
        key = repr((class_of_torch(optimizer), settings, states, kind, master.device))
        keys = self._of_group.setdefault((type(optimizer), partition.index), set())
        if key not in keys and len(keys) == MAX_UPDATES:
            self._warn_once(optimizer)
            return None
        keys.add(key)
        if key not in self._updates:
            self._updates[key] = self._compile(optimizer, settings, state, master, kind)
        update = self._updates[key]
        return None if update is None else CompiledStep(update, partition)

    def _compile(self, optimizer, settings, state, master, kind):
        """Returns the compiled update, or None with a warning if it cannot be compiled."""
        inform(f"DeepCompile compiles the update of {type(optimizer).__name__}")
        numel = min(EXAMPLE_NUMEL, master.numel() // ALIGN_NUMEL * ALIGN_NUMEL)
        states = {name: _rows(value[:numel]) for name, value in state.items() if is_per_element(value, master)}
        names = [name for name in state if name not in states]
        learning_rate, *values = _scalars(0.0, [state[name] for name in names])
        example, scalars = _rows(master.data[:numel]), dict(zip(names, values, strict=True))
        try:
            return compile_update(optimizer, settings, example, states, learning_rate, scalars, kind)
        except Exception as error:
            # Other ranks may be able to.
            logger.warning(
                f"DeepCompile cannot compile the update of {type(optimizer).__name__}, so every step takes several "
                f"passes over memory ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            )
            return None

    def _warn_once(self, optimizer):
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"DeepCompile has compiled {MAX_UPDATES} updates of {type(optimizer).__name__} for one parameter "
                "group and compiles no more for it, because other settings than the learning rate change between "
                "steps; a step takes several passes over memory"
            )


class CompiledStep:
    """One step of one partition, made range by range. The methods are those of ``Step`` in ``rule.py``."""

    def __init__(self, update: Update, partition: Partition):
        master, state = partition.master, partition.state
        self._update, self._master, self._state, self._new = update, master.data, state, partition.new
        self._own = OwnStep(partition)
        self._factors = [] if partition.factor is None else [partition.factor]
        self._per_element = [value for value in state.values() if is_per_element(value, master)]
        self._names = [name for name, value in state.items() if not is_per_element(value, master)]
        values = _scalars(partition.group["lr"], [state[name] for name in self._names])
        results = update.scalars(*values)
        self._new_scalars, scalars = results[: len(self._names)], results[len(self._names) :]
        if values[0].device != master.device:
            # These scalars are on the host, so reading them does not wait for the device.
            scalars = [torch.full((), each.item(), dtype=each.dtype, device=master.device) for each in scalars]
        self._scalars = scalars

    def run(self, gradient: PartitionGradient, first: int, limit: int) -> int:
        before = -first % ALIGN_NUMEL
        if before or limit - first < ALIGN_NUMEL:
            # The kernel takes whole rows. The optimizer itself steps the few elements around them.
            return self._own.run(gradient, first, min(first + before, limit) if before else limit)
        elements = gradient.unscaled(first, end_of_range(self._master, first, limit))
        last = first + elements.numel()
        states = [_rows(value[first:last]) for value in self._per_element]
        self._update.elements(
            _rows(elements),
            *self._factors,
            _rows(self._master[first:last]),
            _rows(self._new[first:last]),
            *states,
            *self._scalars,
        )
        return last

    def finish(self) -> None:
        for name, value in zip(self._names, self._new_scalars, strict=True):
            if torch.is_tensor(self._state[name]):
                self._state[name].copy_(value)
            else:
                self._state[name] = type(self._state[name])(value.item())


def _rows(range_of_elements):
    """Views a range as [rows, ALIGN_NUMEL], because the number of rows may be any, and the kernel knows the other."""
    return range_of_elements.view(-1, ALIGN_NUMEL)


def _is_known(partition):
    """Whether the update can be recorded, and states are of a kind that :class:`CompiledStep` knows."""
    group, state = partition.group, partition.state
    if group.get("differentiable") or not group.get("bias_correction", True):
        return False
    # A tensor among the settings, or in a tuple of them, would be recorded with the value that it has now.
    settings = [each if isinstance(each, (tuple, list)) else [each] for each in _settings(partition).values()]
    if any(map(torch.is_tensor, itertools.chain(*settings))):
        return False
    scalars = [value for value in state.values() if not is_per_element(value, partition.master)]
    kinds = all(isinstance(value, (int, float)) or (torch.is_tensor(value) and value.dim() == 0) for value in scalars)
    # Only the first step of an optimizer without momentum has no state after it, too.
    return kinds and (bool(state) or type(partition.optimizer) is torch.optim.SGD and not group["momentum"])


def _settings(partition):
    """Returns a parameter group's settings but the learning rate.

    A group may have more entries, of schedulers and of the caller, which no update depends on. Groups of DeepSpeed's
    own optimizers lack "differentiable", which ``load_state_dict()`` adds to the defaults only.
    """
    group = partition.group
    return {name: group[name] for name in partition.optimizer.defaults if name != "lr" and name in group}


def _scalars(learning_rate, states):
    """Returns the learning rate and scalar states as fp64 tensors [], all on the device of the states."""
    device = next((value.device for value in states if torch.is_tensor(value)), "cpu")
    return [
        value.detach().reshape(()).to(device, torch.float64, copy=True)
        if torch.is_tensor(value) and not value.is_cpu
        # A fill passes the number to the kernel as an argument. Copying it from the host would make the host wait.
        else torch.full((), float(value), dtype=torch.float64, device=device)
        for value in (learning_rate, *states)
    ]
