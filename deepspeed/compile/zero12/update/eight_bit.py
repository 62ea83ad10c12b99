# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps partitions by Adam with states in 8 bits: ``compile.optimizer_states: "8bit"``.

On a GPU, one pass over memory reads gradient, master weights, codes and scales of whole blocks, and writes all but the
gradient, and the new parameters. No state exists in fp32 outside the pass. Elsewhere, torch steps short ranges
operator by operator.
"""

import importlib
from typing import Any, Callable, Dict, Optional

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from .adam_of_blocks import Blocks, Scalars, Settings
from .blockwise import SIGNED, has_moments, map_of, names_of, to_blocks, zeros
from .dynamic_map import BLOCK
from .ranges import PartitionGradient, end_of_range
from .rule import Partition

_OF_TORCH, _OF_DEEPSPEED = (torch.optim.Adam, torch.optim.AdamW), (FusedAdam, DeepSpeedCPUAdam)
# Elements that are stepped at once where each operator writes its result to memory.
EAGER_NUMEL = 2**22


def problem_with(optimizer: torch.optim.Optimizer) -> Optional[str]:
    """Returns why an optimizer cannot have 8-bit states, with a remedy, or None if it can."""
    if type(optimizer) not in (*_OF_TORCH, *_OF_DEEPSPEED):
        return f"is for Adam and AdamW of torch and DeepSpeed, not for {type(optimizer).__name__}; use one of these"
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return "has no form for the third state of amsgrad=true; set amsgrad to false"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "cannot be differentiated; set the optimizer's differentiable to false"
    return None


class EightBitAdam:
    """The rule for all partitions of an engine."""

    def begin(self, partition: Partition) -> Optional["EightBitStep"]:
        if problem_with(partition.optimizer) is not None or partition.master.dtype != torch.float32:
            return None
        if partition.state and not has_moments(partition.state):
            return None
        return EightBitStep(partition)


def step_blocks_on(device: torch.device) -> Callable[[Blocks, Settings], None]:
    """Returns what steps blocks on a device."""
    # Triton may be missing where there is no GPU.
    name = "adam_kernel" if device.type == "cuda" else "adam_of_blocks"
    return importlib.import_module(f"{__package__}.{name}").step_blocks


class EightBitStep:
    """One step of one partition. The methods are those of ``Step`` in ``rule.py``."""

    def __init__(self, partition: Partition):
        self._partition = partition
        self._master, self._new = partition.master.data, partition.new
        self._step_blocks = step_blocks_on(self._master.device)
        # How many elements of the first block lie before the partition.
        self._before = partition.offset % BLOCK
        self._states: Dict[str, Any] = {}
        self._cut: Dict[int, _CutBlock] = {}

    def run(self, gradient: PartitionGradient, first: int, limit: int) -> int:
        if not self._states:
            self._begin()
        block, inside = divmod(self._before + first, BLOCK)
        if inside or limit - first < BLOCK:
            last = min(first + BLOCK - inside, limit)
            self._run_part(gradient, block, first, last)
            return last
        end = end_of_range(self._master, first, limit if self._master.is_cuda else min(limit, first + EAGER_NUMEL))
        elements = gradient.unscaled(first, end, BLOCK)
        last = first + elements.numel()
        states = self._blocks(slice(block, block + elements.numel() // BLOCK))
        of_elements = (_rows(each) for each in (elements, self._master[first:last], self._new[first:last]))
        self._step_blocks(Blocks(*of_elements, *states), self._settings)
        return last

    def _begin(self):
        """Makes the states in the first step, and those that were loaded what this rule needs."""
        partition, master = self._partition, self._partition.master
        state = partition.state
        if state:
            to_blocks(state, partition.offset, master)
        else:
            state = {**_new_state(partition), **zeros(partition.offset, master)}
        # The host reads the count in each step, so it stays there.
        if torch.is_tensor(state["step"]):
            state["step"] = state["step"].cpu()
        partition.optimizer.state[master] = self._states = state
        self._count = int(state["step"]) + 1
        self._settings = _settings(partition, self._count)

    def _blocks(self, rows):
        """Returns codes and scales of some blocks, each a list with an entry for each state."""
        named = [names_of(state) for state in SIGNED]
        return [self._states[name][rows] for name, _ in named], [self._states[name][rows] for _, name in named]

    def _run_part(self, gradient, block, first, last):
        """Steps some elements of a block, whose scale depends on other elements that are stepped at another time.

        The pass steps a copy of the block, so that each element has the same bits as in a block that is not cut. Codes
        and scale are those of the pass that has the gradients of all elements of the block that lie in the partition.
        """
        if block not in self._cut:
            begin = block * BLOCK - self._before
            self._cut[block] = _CutBlock(self._master[max(begin, 0) : begin + BLOCK], max(-begin, 0))
        cut = self._cut[block]
        part = slice(self._before + first - block * BLOCK, self._before + last - block * BLOCK)
        values = gradient.as_it_is(first, last)
        cut.take(part, values)
        master, new_row = cut.master.clone(), torch.empty_like(cut.master, dtype=self._new.dtype)
        states = self._blocks(slice(block, block + 1))
        if cut.missing == 0:
            del self._cut[block]
        else:
            states = [[each.clone() for each in of_state] for of_state in states]
        self._step_blocks(Blocks(cut.gradient, master, new_row, *states), self._settings)
        self._master[first:last] = master[0, part]
        self._new[first:last] = new_row[0, part]

    def finish(self) -> None:
        states = self._states
        if torch.is_tensor(states["step"]):
            states["step"].fill_(self._count)
        else:
            states["step"] = self._count


class _CutBlock:
    """A block of which parts are stepped one by one: what it had before the step. All tensors are [1, BLOCK].

    Args:
        master: the master weights of the block that lie in the partition.
        before: how many elements of the block lie before the partition.
    """

    def __init__(self, master: torch.Tensor, before: int):
        self.missing = master.numel()  # elements whose gradient is not known yet
        self.master = master.new_zeros(1, BLOCK)
        self.master[0, before : before + master.numel()] = master
        self.gradient = master.new_empty(0)

    def take(self, part: slice, gradient: torch.Tensor) -> None:
        """Takes the gradient of some elements."""
        if not self.gradient.numel():
            self.gradient = torch.zeros_like(self.master, dtype=gradient.dtype)
        self.gradient[0, part] = gradient
        self.missing -= gradient.numel()


def _rows(elements):
    return elements.view(-1, BLOCK)


def _new_state(partition):
    """Returns the state before the first step, with the count of steps as the optimizer itself has it."""
    if isinstance(partition.optimizer, _OF_DEEPSPEED):
        return {"step": partition.group.get("step", 0)}
    return {"step": torch.zeros((), dtype=torch.float32, device="cpu")}


def _settings(partition, count):
    """Returns the settings of step ``count`` of a partition, with scalars that are computed in fp64."""
    group, optimizer, master = partition.group, partition.optimizer, partition.master
    of_deepspeed = getattr(optimizer, "adam_w_mode", None)
    decoupled = bool(group.get("decoupled_weight_decay", False) if of_deepspeed is None else of_deepspeed)
    rate, beta, beta_sq, decay, epsilon = (
        _number(each) for each in (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
    )
    corrects = group.get("bias_correction", True)
    scalars = Scalars(
        decay=rate * decay if decoupled else decay,
        weight=1 - beta,
        weight_sq=1 - beta_sq,
        rate=rate,
        correction=1 - beta**count if corrects else 1.0,
        root_of_correction_sq=(1 - beta_sq**count) ** 0.5 if corrects else 1.0,
        epsilon=epsilon,
    )
    maps = [map_of(state, master) for state in SIGNED]
    maximize = bool(group.get("maximize", False))
    return Settings(decoupled, maximize, partition.factor, _on_device(scalars, master.device), maps)


def _on_device(numbers, device):
    """Returns numbers, of which some may be tensors [] on the device, as an fp32 tensor. The host does not wait."""
    if any(map(torch.is_tensor, numbers)):
        # A fill passes the number to the kernel as an argument.
        fp32 = torch.zeros(len(numbers), dtype=torch.float32, device=device)
        for place, each in zip(fp32, numbers, strict=True):
            place.fill_(each)
        return fp32
    # From other memory than pinned memory, the host would wait for the copy.
    return torch.tensor(numbers, dtype=torch.float32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _number(value):
    """Returns a setting as a number, or as an fp64 tensor [] if it lies on a device: the host does not wait for it."""
    if not torch.is_tensor(value):
        return float(value)
    return value.item() if value.is_cpu else value.detach().double().reshape(())
