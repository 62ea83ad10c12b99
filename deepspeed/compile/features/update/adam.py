# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps partitions by Adam and AdamW, range by range, each range in one pass over memory.

The pass reads a gradient in its own dtype, scales it, updates master weights and states, and writes new parameters.
On a GPU the pass is a kernel in Triton (``adam_kernel.py``), elsewhere torch's operators, compiled by Inductor
(``adam_operators.py``). Inductor's kernels for a GPU would copy new parameters whose memory is not aligned.

Every setting is a run-time argument of the pass, so a schedule of a setting compiles nothing.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.utils._triton import has_triton_package

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.utils import logger

from ...zero_1_and_2.feature import Request
from ...zero_1_and_2.messages import log_info
from ...zero_1_and_2.parameter.runs import Runs
from ...zero_1_and_2.step.authors import hooks_of_torch, runs_unpatched_step
from ...zero_1_and_2.step.partition_gradient import ALIGN_NUMEL, PartitionGradient
from ...zero_1_and_2.step.rule import Partition
from .adam_operators import Elements, Scalars, Settings, compile_step
from .own_ranges import end_of_range

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW)
_OF_DEEPSPEED = (FusedAdam, DeepSpeedCPUAdam)
# The names of these optimizers in the configuration.
_BY_NAME = ("adam", "adamw")
_OF_OTHERS = "is for Adam and AdamW of torch and DeepSpeed, not for {}; use one of these"
# With fewer elements, all steps of a training together save less time than compiling takes.
LEAST_NUMEL = 2**24
# A run of at least so many new parameters is written where it lies. Shorter ones are copied together, because to start
# a kernel for each would take longer than the copy.
WRITTEN_IN_PLACE = 2**20

StepRows = Callable[[Elements, Settings], None]


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is an Adam or AdamW of torch or DeepSpeed, and no subclass."""
    return type(optimizer) in (*_OF_TORCH, *_OF_DEEPSPEED)


def is_of_deepspeed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is an Adam of DeepSpeed, which is written in C++."""
    return type(optimizer) in _OF_DEEPSPEED


def problem_with(optimizer: torch.optim.Optimizer) -> Optional[str]:
    """Returns why this file cannot make every step of an optimizer, with a remedy, or None if it can."""
    if not is_adam(optimizer):
        return _OF_OTHERS.format(type(optimizer).__name__)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "cannot be differentiated; set the optimizer's differentiable to false"
    # The average moves by a part of its difference to the square of a gradient, in which a much smaller one is lost.
    # Of an average that moves by most of it, nothing would be left. The host does not wait to read a tensor.
    betas = [group["betas"][1] for group in optimizer.param_groups]
    if any(not torch.is_tensor(beta) and beta < 0.5 for beta in betas):
        return "loses squares of falling gradients where betas[1] is below 0.5; raise it"
    return None


def is_scaled_by_autocast(engine: "DeepSpeedEngine") -> bool:
    """Whether ``torch_autocast`` in fp16 scales gradients for the optimizer's own ``step()``.

    An engine without ``torch_autocast`` does so too, once another engine of the process had it.
    """
    asked = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16
    return asked or getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None


def unsupported_forms(
    option: str, problem_with: Callable[[torch.optim.Optimizer], Optional[str]], request: Request, kept: str
) -> Iterator[str]:
    """Yields a sentence for each reason why an engine cannot keep states or master weights in a form of our own.

    Args:
        option: as for :class:`RefuseOwnStep`.
        problem_with: :func:`problem_with`, or a function that finds more problems.
        kept: the tensors of this form, for example "states".
    """
    engine, asked, name = request.engine, f"compile.{option}", f"compile.{option.partition('=')[0]}"
    problem = None if request.optimizer is None else problem_with(request.optimizer)
    if request.optimizer is None and engine.client_optimizer is None and engine.optimizer_name() not in _BY_NAME:
        problem = _OF_OTHERS.format(engine.optimizer_name())
    if problem is not None:
        yield f"{asked} {problem}, or leave {name} out"
    elif request.optimizer is not None and not runs_unpatched_step(request.optimizer):
        yield (
            f"{asked} leaves the optimizer's own step() out, which has hooks or was replaced; undo that, or leave "
            f"{name} out"
        )
    if is_scaled_by_autocast(engine):
        yield (
            f"{asked} leaves out the optimizer's own step(), which torch_autocast in fp16 scales gradients for; set "
            f"torch_autocast.dtype to bfloat16, or leave {name} out"
        )
    if engine.zero_cpu_offload():
        yield (
            f"{asked} saves memory of the device, where zero_optimization.offload_optimizer keeps no {kept}; leave "
            "one of them out"
        )
    if torch.cuda.is_available() and not has_triton_package():
        yield f"{asked} needs Triton on a GPU; install triton, or leave {name} out"
    if engine.fp16_master_weights_and_gradients() or engine.bf16_master_weights_and_gradients():
        yield f"{asked} needs master weights in fp32; leave it out, or master_weights_and_grads in low precision"


def new_state(partition: Partition) -> Dict[str, Any]:
    """Returns the state before the first step: only the step count, in the optimizer's own form."""
    if is_of_deepspeed(partition.optimizer):
        return {"step": partition.group.get("step", 0)}
    return {"step": torch.zeros((), dtype=torch.float32, device="cpu")}


class RefuseOwnStep:
    """The last rule. It raises, because the optimizer's own ``step()`` cannot read states of this form.

    Args:
        option: the option of the section ``compile`` that asks for the form, as the user writes it.
    """

    def __init__(self, option: str):
        self._option = option

    def begin(self, partition: Partition) -> None:
        name = self._option.partition("=")[0]
        raise RuntimeError(
            f"compile.{self._option} leaves the optimizer's own step() out, which has hooks, was replaced, has "
            f"options or states of parameter group {partition.index} that have no such form, or works with a gradient "
            f"scaler; undo that, or leave compile.{name} out"
        )


class OnePassAdam:
    """The rule for the partitions of an engine whose states are in fp32."""

    def __init__(self) -> None:
        # Formats of a partition -> the pass, or None if it cannot be compiled.
        self._passes: Dict[Tuple[Any, ...], Optional[StepRows]] = {}

    def begin(self, partition: Partition) -> Optional["AdamStep"]:
        """Begins a step of a partition.

        Returns:
            None if the optimizer is not Adam, or its ``step()`` is patched; in the first step, in which the optimizer
            makes its states; if the partition has fewer than ``LEAST_NUMEL`` elements; if its master weights or states
            are not in fp32; or if the pass cannot be compiled.
        """
        if not partition.step_is_unpatched:
            return None
        master, state = partition.master, partition.state
        if (
            problem_with(partition.optimizer) is not None
            or master.numel() < LEAST_NUMEL
            or "step" not in state
            or not all(is_fp32(tensor, master) for tensor in (master, *map(state.get, names_of_states(partition))))
        ):
            return None
        step_rows = self._pass(partition)
        return None if step_rows is None else AdamStep(partition, step_rows, kernel_for(master))

    def _pass(self, partition):
        """Returns the pass for a partition, compiled before anything is changed, or None if it cannot be compiled."""
        shape, states, master = (1, ALIGN_NUMEL), len(names_of_states(partition)), partition.master
        kind = (partition.gradient_dtype, partition.new.dtype, states, master.device)
        if kind not in self._passes:
            name = type(partition.optimizer).__name__
            log_info(f"DeepCompile compiles the update of {name}")
            gradient, new = (master.new_zeros(shape, dtype=dtype) for dtype in kind[:2])
            like = Elements(gradient, master.new_zeros(shape), new, (*master.new_zeros(states, *shape),))
            try:
                self._passes[kind] = _kernel(like) if master.is_cuda else compile_step(like)
            except Exception as error:
                # Go on without the pass: other ranks may have compiled it.
                logger.warning(
                    f"DeepCompile cannot compile the update of {name}, so every step takes several passes over memory "
                    f"({type(error).__name__}: {str(error).partition(chr(10))[0]})"
                )
                self._passes[kind] = None
        return self._passes[kind]


def kernel() -> ModuleType:
    """Returns the module of the kernel for GPUs. Imported late, because a machine without a GPU may lack Triton."""
    return importlib.import_module(f"{__package__}.adam_kernel")


def kernel_for(master: torch.Tensor) -> Optional[ModuleType]:
    """Returns the module of the kernel that steps a partition, or None if its master weights are on the host."""
    return kernel() if master.is_cuda else None


def _kernel(like):
    """Returns the kernel for GPUs after a step of ``like``, which raises if the kernel cannot be compiled."""
    step_rows: StepRows = kernel().step_rows
    step_rows(like, Settings(like.master.new_ones(len(Scalars._fields))))
    return step_rows


def names_of_states(partition: Partition) -> Tuple[str, ...]:
    """Returns the names of the states with a value for each element, in the order of ``Elements.states``."""
    # DeepSpeed's Adam refuses amsgrad.
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if partition.group.get("amsgrad") else ("exp_avg", "exp_avg_sq")


def is_fp32(value: Any, master: torch.Tensor) -> bool:
    """Whether a state has an fp32 value for each element of the master weights."""
    return torch.is_tensor(value) and value.dtype == torch.float32 and value.shape == master.shape


class AdamStep:
    """One step of one partition, whose states are in fp32. The public methods are those of the core's ``Step``.

    Elements are stepped in rows. A subclass for states of another form says how many columns a row has: a divisor of
    ``SHARD_MULTIPLE``, so that no shard cuts a row.

    Args:
        step_rows: steps rows.
        kernel: the module that steps all of a range with one launch in place of ``step_rows``, or None.

    Attributes:
        master: the master weights, 1-D. The caller may replace them by their remainders.
    """

    columns = ALIGN_NUMEL
    has_scales = False  # whether ``states`` returns scales
    # Elements to step at once on the host, if fewer than a range, because each operator writes its result to memory.
    numel_on_host: Optional[int] = None

    def __init__(self, partition: Partition, step_rows: StepRows, kernel: Optional[ModuleType] = None):
        self.partition, self.master, self.new = partition, partition.master.data, partition.new
        self.step_rows, self._kernel, self._table = step_rows, kernel, None
        self._state: Dict[str, Any] = {}

    def prepare(self, gradients: List[Tuple[int, torch.Tensor]]) -> None:
        """Tells the device where gradients and new parameters lie, while it is still busy with what comes before."""
        if self._kernel is not None:
            runs = self._kernel.runs_of(gradients, self.new)
            self._table = self._kernel.tabulate(runs, self.has_scales, self.master.device)

    def run(self, gradient: PartitionGradient, first: int, limit: int) -> int:
        if not self._state:
            # Begin here: an overflow would have ended the step before.
            self._state = self.begin()
            self._count = _number(self._state["step"]) + 1
            self.settings = self.make_settings(_scalars(self.partition, self._count))
        if self._kernel is not None:
            if self._table is None:
                self.prepare(gradient.by_offset())
            taken = gradient.as_they_are(first, limit)
            states = self.states(self._state, 0, self.master.numel())
            self._kernel.step_runs(self._table, first, limit, self.master, self.settings, *states)
            # The device reads them before it does what is queued later.
            del taken
            return limit
        if self.master.is_cpu and self.numel_on_host is not None:
            limit = min(limit, first + self.numel_on_host)
        limit, new = stretch(self.new, first, end_of_range(self.master, first, limit))
        elements = gradient.unscaled(first, limit, self.columns)
        last = first + elements.numel()
        if new is None:
            # Remainders need the parameters from before the step.
            new = self.new.read(first, last)
        else:
            new = new[: last - first]
        rows = (tensor.view(-1, self.columns) for tensor in (elements, self.master[first:last], new))
        self.step_rows(Elements(*rows, *self.states(self._state, first, last)), self.settings)
        if new.untyped_storage().data_ptr() != self.new.memory.untyped_storage().data_ptr():
            self.new.write(first, new)
        return last

    def begin(self) -> Dict[str, Any]:
        """Called when the first elements are stepped. Returns the optimizer's state of the master weights."""
        return self.partition.state

    def make_settings(self, scalars: torch.Tensor) -> Settings:
        return Settings(scalars)

    def states(self, state: Dict[str, Any], first: int, last: int) -> Tuple[Tuple[torch.Tensor, ...], ...]:
        """Returns ``Elements.states`` of whole rows, and ``Elements.scales`` if there are any."""
        return (tuple(state[name][first:last].view(-1, self.columns) for name in names_of_states(self.partition)),)

    def finish(self) -> None:
        step = self._state["step"]
        if torch.is_tensor(step):
            step.fill_(self._count)
        else:
            self._state["step"] = type(step)(self._count)
        for hook in hooks_of_torch():
            hook(self.partition.optimizer, (), {})


def stretch(runs: Runs, first: int, limit: int) -> Tuple[int, Optional[torch.Tensor]]:
    """Returns the end of the elements of new parameters to step at once from ``first`` on, and their memory.

    Short runs have no such memory together (None): their elements are copied.
    """
    is_short, end = False, first
    for begin, place, numel in runs.between(first, limit):
        if numel >= WRITTEN_IN_PLACE or (not is_short and begin + numel == limit):
            return (begin, None) if is_short else (begin + numel, runs.memory.narrow(0, place, numel))
        is_short, end = True, begin + numel
    return end, None


def _scalars(partition, count):
    """Returns the scalars of step ``count``, computed in fp64, as an fp32 tensor on the partition's device."""
    group, inner = partition.group, partition.optimizer
    # In DeepSpeed's Adam an attribute of the optimizer, not of the group, decouples weight decay.
    decoupled = inner.adam_w_mode if is_of_deepspeed(inner) else group.get("decoupled_weight_decay", False)
    rate, beta, beta_sq, decay, epsilon = (
        _number(setting) for setting in (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
    )
    corrects = group.get("bias_correction", True)
    scalars = _on_device(
        Scalars(
            factor=-1.0 if group.get("maximize") else 1.0,
            decay_of_gradient=0.0 if decoupled else decay,
            decay=rate * decay if decoupled else 0.0,
            weight=1 - beta,
            weight_sq=1 - beta_sq,
            rate=rate,
            correction=1 - beta**count if corrects else 1.0,
            root_of_correction_sq=(1 - beta_sq**count) ** 0.5 if corrects else 1.0,
            epsilon=epsilon,
        ),
        partition.master.device,
    )
    if partition.factor is not None:
        scalars[:1].mul_(partition.factor)
    return scalars


def _on_device(numbers, device):
    """Returns numbers, some perhaps tensors [] on the device, as an fp32 tensor. The host does not wait."""
    if any(map(torch.is_tensor, numbers)):
        # A fill passes the number to the kernel as an argument.
        fp32 = torch.zeros(len(numbers), dtype=torch.float32, device=device)
        for place, number in zip(fp32, numbers, strict=True):
            place.fill_(number)
        return fp32
    # Use pinned memory: otherwise the host would wait for the copy.
    return torch.tensor(numbers, dtype=torch.float32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _number(value):
    """Returns a setting or a count as a number, or as an fp64 tensor [] if it lies on a device, so that the host does
    not wait."""
    if not torch.is_tensor(value):
        return float(value)
    return value.item() if value.is_cpu else value.detach().double().reshape(())
