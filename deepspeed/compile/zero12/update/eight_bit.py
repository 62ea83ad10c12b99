# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps partitions by Adam with states in 8 bits, in one pass over memory: ``compile.optimizer_states: "8bit"``.

The pass reads gradient, master weights, codes and scales of whole blocks, and writes all but the gradient, and the new
parameters. No state exists in fp32 outside the pass. Inductor compiles it; with the backend "eager", torch runs it
operator by operator over short ranges.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.utils import logger

from ..messages import inform
from .blockwise import SIGNED, is_blockwise, map_of, names_of, to_blocks, zeros
from .dynamic_map import BLOCK, decode, encode
from .ranges import PartitionGradient, end_of_range
from .recorded import compile_rows
from .rule import Partition

_OF_TORCH, _OF_DEEPSPEED = (torch.optim.Adam, torch.optim.AdamW), (FusedAdam, DeepSpeedCPUAdam)
# Parameter groups of fewer elements are stepped operator by operator. The number does not depend on that of ranks, and
# so the rounding does not either.
LEAST_NUMEL = 2**24
# Elements of the example with which the pass is recorded. It takes any number of blocks.
EXAMPLE_NUMEL = 2**24
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
    """The rule for all partitions of an engine.

    Args:
        compiles: whether generated code may step partitions.
    """

    def __init__(self, compiles: bool):
        self._compiles = compiles
        # Index of a parameter group -> how many elements it has, over all ranks.
        self._numel: Dict[int, int] = {}
        # What a pass depends on -> the compiled pass, or None if it cannot be compiled.
        self._compiled: Dict[_Kind, Optional[Callable]] = {}

    def begin(self, partition: Partition) -> Optional["EightBitStep"]:
        if problem_with(partition.optimizer) is not None or partition.master.dtype != torch.float32:
            return None
        state = partition.state
        if state and not is_blockwise(state) and not all(name in state for name in SIGNED):
            return None
        kind, compiled = _kind_of(partition), None
        if self._compiles and self._count(partition) >= LEAST_NUMEL:
            if kind not in self._compiled:
                self._compiled[kind] = self._compile(partition, kind)
            compiled = self._compiled[kind]
        return EightBitStep(partition, AdamOfBlocks(kind.decoupled, kind.maximize), compiled)

    def _count(self, partition):
        """Returns how many elements a parameter group has, over all ranks."""
        if partition.index not in self._numel:
            self._numel[partition.index] = sum(piece.numel for piece in partition.pieces())
        return self._numel[partition.index]

    def _compile(self, partition, kind):
        """Returns the compiled pass, or None with a warning if it cannot be compiled."""
        inform(f"DeepCompile compiles the update of {type(partition.optimizer).__name__} with 8-bit states")
        try:
            return compile_rows(AdamOfBlocks(kind.decoupled, kind.maximize), *_example(partition, kind))
        except Exception as error:
            # Other ranks may be able to.
            logger.warning(
                f"DeepCompile cannot compile the update of {type(partition.optimizer).__name__} with 8-bit states, so "
                f"every step takes many passes over memory ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]})"
            )
            return None


class AdamOfBlocks(torch.nn.Module):
    """Steps whole blocks by Adam. The arithmetic is torchao's, in its order, so that codes have the same bits.

    Args:
        decoupled: whether weight decay is AdamW's.
        maximize: whether to go up the gradient.
    """

    def __init__(self, decoupled: bool, maximize: bool):
        super().__init__()
        self._decoupled, self._maximize = decoupled, maximize

    def forward(
        self,
        gradient: torch.Tensor,
        factor: Optional[torch.Tensor],
        master: torch.Tensor,
        new: torch.Tensor,
        codes: List[torch.Tensor],
        scales: List[torch.Tensor],
        maps: List[torch.Tensor],
        scalars: List[torch.Tensor],
    ) -> None:
        """Changes ``master``, ``new``, ``codes`` and ``scales`` in place.

        Args:
            gradient: [blocks, BLOCK], in any dtype.
            factor: fp32 [1], by which to multiply the gradient, or None.
            master: fp32 [blocks, BLOCK].
            new: the memory for the new parameters, [blocks, BLOCK].
            codes: of ``exp_avg`` and ``exp_avg_sq``, uint8 [blocks, BLOCK].
            scales: of the same, fp32 [blocks].
            maps: values and thresholds of the map of ``exp_avg``, and those of ``exp_avg_sq``.
            scalars: fp32 [] in the order of :class:`_Scalars`.
        """
        values, thresholds, values_sq, thresholds_sq = maps
        s = _Scalars(*scalars)
        gradient = gradient.to(torch.float32)
        if factor is not None:
            gradient = gradient * factor
        if self._maximize:
            gradient = -gradient
        weights = master
        if self._decoupled:
            weights = master - s.decay * master
        else:
            gradient = gradient + s.decay * master
        mean, mean_sq = decode(codes[0], scales[0], values), decode(codes[1], scales[1], values_sq)
        mean = mean + s.weight * (gradient - mean)
        mean_sq = mean_sq + s.weight_sq * (gradient * gradient - mean_sq)
        weights = weights - s.rate * (mean / s.correction) / (mean_sq.sqrt() / s.root_of_correction_sq + s.epsilon)
        new_codes, new_scales = encode(mean, thresholds, signed=True)
        new_codes_sq, new_scales_sq = encode(mean_sq, thresholds_sq, signed=False)
        master.copy_(weights)
        new.copy_(weights)
        codes[0].copy_(new_codes)
        codes[1].copy_(new_codes_sq)
        scales[0].copy_(new_scales)
        scales[1].copy_(new_scales_sq)


class _Scalars(NamedTuple):
    """What one step of a parameter group has for all elements, as numbers or tensors []."""

    decay: Any  # rate * weight_decay if weight decay is decoupled, else weight_decay
    weight: Any  # 1 - beta1
    weight_sq: Any  # 1 - beta2
    rate: Any
    correction: Any  # 1 - beta1**step
    root_of_correction_sq: Any  # (1 - beta2**step)**0.5
    epsilon: Any


class _Kind(NamedTuple):
    """What a pass depends on."""

    decoupled: bool
    maximize: bool
    gradient: torch.dtype
    new: torch.dtype
    scaled: bool  # whether gradients are multiplied by a factor
    device: torch.device
    # Whether the first whole block begins at a multiple of 16 bytes, in master weights and new parameters.
    aligned: bool
    new_aligned: bool


def _kind_of(partition):
    group, optimizer, new = partition.group, partition.optimizer, partition.new_like
    of_deepspeed = getattr(optimizer, "adam_w_mode", None)
    decoupled = group.get("decoupled_weight_decay", False) if of_deepspeed is None else of_deepspeed
    before = -partition.offset % BLOCK
    return _Kind(
        bool(decoupled),
        bool(group.get("maximize", False)),
        partition.gradient_dtype,
        new.dtype,
        partition.factor is not None,
        partition.master.device,
        _is_aligned(partition.master, before),
        _is_aligned(new, before),
    )


def _is_aligned(tensor, first):
    return (tensor.data_ptr() + first * tensor.element_size()) % 16 == 0


def _example(partition, kind):
    """Returns examples for :class:`AdamOfBlocks`, and which of them have rows."""
    # Inductor chooses the size of a kernel's tiles by the example's.
    blocks = EXAMPLE_NUMEL // BLOCK

    def rows(dtype, aligned=True):
        # On a GPU, Inductor copies inputs that are less aligned than the example, and copies them back.
        memory = torch.empty(blocks * BLOCK + 1, dtype=dtype, device=kind.device)
        return memory[0 if aligned else 1 :][: blocks * BLOCK].view(blocks, BLOCK)

    def tensors(count, *shape):
        return [torch.empty(shape, dtype=torch.float32, device=kind.device) for _ in range(count)]

    inputs = (
        rows(kind.gradient),
        *(tensors(1, 1) if kind.scaled else [None]),
        rows(torch.float32, kind.aligned),
        rows(kind.new, kind.new_aligned),
        [rows(torch.uint8) for _ in SIGNED],
        tensors(len(SIGNED), blocks),
        _maps(partition.master),
        tensors(len(_Scalars._fields)),
    )
    return inputs, (True, False, True, True, True, True, False, False)


def _maps(like):
    return [each for state in SIGNED for each in map_of(state, like)]


class EightBitStep:
    """One step of one partition. The methods are those of ``Step`` in ``rule.py``.

    Args:
        partition: to step.
        module: steps blocks operator by operator.
        compiled: steps blocks in one pass, or None.
    """

    def __init__(self, partition: Partition, module: AdamOfBlocks, compiled: Optional[Callable]):
        self._partition, self._module, self._compiled = partition, module, compiled
        self._optimizer = partition.optimizer
        self._master, self._numel = partition.master.data, partition.master.numel()
        # How many elements of the first block lie before the partition.
        self._before = partition.offset % BLOCK
        self._states: Dict[str, Any] = {}
        self._cut: Dict[int, _CutBlock] = {}

    def run(self, gradient: PartitionGradient, first: int, limit: int, new: Callable[[int, int], torch.Tensor]) -> int:
        if not self._states:
            self._begin()
        block, inside = divmod(self._before + first, BLOCK)
        if inside or limit - first < BLOCK:
            last = min(first + BLOCK - inside, limit)
            self._run_part(gradient, block, first, last, new)
            return last
        end = end_of_range(self._master, first, limit)
        if self._compiled is None:
            end = min(end, first + EAGER_NUMEL)
        elements = gradient.unscaled(first, max(end, first + BLOCK), BLOCK)
        last = first + elements.numel()
        codes, scales = self._blocks(slice(block, block + elements.numel() // BLOCK))
        self._step(_rows(elements), _rows(self._master[first:last]), _rows(new(first, last)), codes, scales)
        return last

    def _begin(self):
        """Makes the states in the first step, and those that were loaded what this rule needs."""
        partition, master = self._partition, self._partition.master
        state = partition.state or _new_state(partition)
        if is_blockwise(state) or SIGNED.keys() <= state.keys():
            to_blocks(state, partition.offset, master)
        else:
            state.update(zeros(partition.offset, master))
        # The host reads the count in each step, so it stays there.
        if torch.is_tensor(state["step"]):
            state["step"] = state["step"].cpu()
        partition.optimizer.state[master] = self._states = state
        self._count = int(state["step"]) + 1
        self._scalars = _scalars(partition.group, self._count, self._module._decoupled, master.device)
        self._maps = _maps(master)

    def _blocks(self, rows):
        """Returns codes and scales of some blocks, each a list with an entry for each state."""
        named = [names_of(state) for state in SIGNED]
        return [self._states[name][rows] for name, _ in named], [self._states[name][rows] for _, name in named]

    def _step(self, gradient, master, new, codes, scales):
        factor = self._partition.factor
        if self._compiled is None:
            self._module(gradient, factor, master, new, codes, scales, self._maps, self._scalars)
            return
        factors = [] if factor is None else [factor]
        self._compiled(gradient, *factors, master, new, *codes, *scales, *self._maps, *self._scalars)

    def _run_part(self, gradient, block, first, last, new):
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
        memory = new(first, last)
        cut.take(part, values)
        master, new_rows = cut.master.clone(), torch.zeros_like(cut.master, dtype=memory.dtype)
        # Two rows, because a compiled pass takes at least as many.
        codes, scales = (
            [each.expand(2, *each.shape[1:]).clone() for each in of_block]
            for of_block in self._blocks(slice(block, block + 1))
        )
        self._step(cut.gradient, master, new_rows, codes, scales)
        self._master[first:last] = master[0, part]
        memory.copy_(new_rows[0, part])
        if cut.missing == 0:
            for kept, stepped in zip(self._blocks(block), (codes, scales), strict=True):
                for row, rows in zip(kept, stepped, strict=True):
                    row.copy_(rows[0])
            del self._cut[block]

    def finish(self) -> None:
        states = self._states
        # What step() notes if a scheduler of torch has wrapped it: the scheduler warns if nothing calls step().
        if "step" in vars(self._optimizer):
            self._optimizer._opt_called = True
        if torch.is_tensor(states["step"]):
            states["step"].fill_(self._count)
        else:
            states["step"] = self._count


class _CutBlock:
    """A block of which parts are stepped one by one: what it had before the step. All tensors are [2, BLOCK].

    Args:
        master: the master weights of the block that lie in the partition.
        before: how many elements of the block lie before the partition.
    """

    def __init__(self, master: torch.Tensor, before: int):
        self.missing = master.numel()  # elements whose gradient is not known yet
        self.master = master.new_zeros(2, BLOCK)
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


def _scalars(group, count, decoupled, device):
    """Returns the scalars of a step as fp32 tensors [] on ``device``, computed in fp64."""
    rate, beta, beta_sq, decay, epsilon = (
        _number(each) for each in (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
    )
    corrects = group.get("bias_correction", True)
    scalars = _Scalars(
        decay=rate * decay if decoupled else decay,
        weight=1 - beta,
        weight_sq=1 - beta_sq,
        rate=rate,
        correction=1 - beta**count if corrects else 1.0,
        root_of_correction_sq=(1 - beta_sq**count) ** 0.5 if corrects else 1.0,
        epsilon=epsilon,
    )
    return [
        each.to(device, torch.float32)
        if torch.is_tensor(each)
        # A fill passes the number to the kernel as an argument. Copying it from the host would make the host wait.
        else torch.full((), each, dtype=torch.float32, device=device)
        for each in scalars
    ]


def _number(value):
    """Returns a setting as a number, or as an fp64 tensor [] if it lies on a device: the host does not wait for it."""
    if not torch.is_tensor(value):
        return float(value)
    return value.item() if value.is_cpu else value.detach().double().reshape(())
