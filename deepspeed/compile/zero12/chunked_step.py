# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps an optimizer over a flat partition chunk by chunk, to save memory.

The fp32 gradients of a partition need twice the memory of its bf16 gradients, and the temporaries of an optimizer may
need as much again. If the optimizer treats each element by itself, the fp32 gradients and the temporaries need to
exist only for one chunk at a time.
"""

import functools
import sys
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Callable, List, Optional, Tuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from . import compiled_update
from .compiled_update import ALIGN_NUMEL, is_per_element

if TYPE_CHECKING:
    from .compiled_update import StepOfGroup
    from .master_gradient import MasterGradient

# Elements of a chunk: 512 MiB of fp32. Kernels over so many elements run at the memory's full speed.
CHUNK_NUMEL = 2**27
# On the host 24 MiB: most of a chunk is still in the processor's cache when the next pass reads it, and the C library
# takes memory of more than 32 MiB from the system anew each time. With less, the threads of each pass would take too
# long to start.
CHUNK_NUMEL_ON_HOST = 3 * 2**21

# Optimizers that treat each element by itself.
_ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, FusedAdam),
    DeepSpeedCPUAdam,
)


# Modules of torch whose functions only wrap `func`: hooks of step(), a scheduler's note of a call, torch.no_grad().
_WRAPPERS = {"torch.optim.optimizer", "torch.optim.lr_scheduler", "torch.utils._contextlib"}
# Whose functions an optimizer may call.
_PACKAGES = {"torch", "deepspeed", "builtins", *sys.stdlib_module_names} - {"__main__"}


def may_step_in_chunks(optimizer: torch.optim.Optimizer) -> List[bool]:
    """Says of each parameter group whether chunks of its parameter may be stepped, by the optimizer or otherwise.

    Chunks must give the result of one step, and nobody but the authors of the optimizer may see them. So torch or
    DeepSpeed must have written all that ``step()`` runs. Somebody else may have replaced ``step()`` on the instance or
    on the class, a function that it calls, or the class, and may do so at any time.
    """
    may = (
        type(optimizer) in _ELEMENTWISE
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
        and _runs_own_step(optimizer)
        and not _calls_others(optimizer)
    )
    return [may and _may_cut(optimizer, group["params"]) for group in optimizer.param_groups]


def _may_cut(optimizer, parameters):
    return len(parameters) == 1 and _is_complete(optimizer.state.get(parameters[0]) or {}, parameters[0])


def _runs_own_step(optimizer):
    """Whether ``optimizer.step()`` runs the ``step()`` of the optimizer's authors, within wrappers of torch at most.

    A mark on a function proves nothing: torch's wrappers, and ``functools.wraps``, copy all marks. What a function
    calls is in its closure, and who has written a function is in its globals. Neither can be copied.
    """
    function = optimizer.step
    while True:
        if isinstance(function, MethodType):
            if function.__self__ is not optimizer:
                return False
            function = function.__func__
        if not isinstance(function, FunctionType):
            return False
        module = function.__globals__["__name__"]
        if module not in _WRAPPERS:
            authors = {cls.__module__ for cls in type(optimizer).__mro__[:-1]}
            return module in authors and module.partition(".")[0] in _PACKAGES and function.__code__.co_name == "step"
        held = _closure(function)
        # A scheduler's wrapper steps the optimizer for which it was made.
        if "opt_ref" in held and held["opt_ref"]() is not optimizer:
            return False
        # Each class of contexts may decorate a function so.
        if "ctx_factory" in held and type(getattr(held["ctx_factory"], "__self__", None)) is not torch.no_grad:
            return False
        function = held.get("func")


def _calls_others(optimizer):
    """Whether somebody else has written a function that an optimizer's ``step()`` may call."""
    classes = [cls for cls in type(optimizer).__mro__ if cls.__module__ not in ("torch.optim.optimizer", "builtins")]
    methods = {name: value for cls in classes for name, value in vars(cls).items()}
    hiding = [value for name, value in vars(optimizer).items() if name in methods and name != "step"]
    named = [value for cls in classes for value in vars(sys.modules[cls.__module__]).values()]
    return any(map(_is_foreign, [*methods.values(), *hiding, *named, optimizer._optimizer_step_code]))


def _is_foreign(value):
    """Whether ``value`` is, or calls, a function of neither torch nor DeepSpeed nor the standard library."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return _is_foreign(value.__func__)
    if isinstance(value, functools.partial):
        return _is_foreign(value.func)
    if not isinstance(value, FunctionType):
        return callable(value) and type(value).__module__.partition(".")[0] not in _PACKAGES
    if value.__globals__["__name__"].partition(".")[0] not in _PACKAGES:
        return True
    return value.__closure__ is not None and any(map(_is_foreign, _closure(value).values()))


def _closure(function):
    """Returns name -> value of the variables of outer functions that a function uses."""
    held = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in held if cell != CellType()}


def _is_complete(state, parameter):
    # The first step makes the state. A later step makes an entry that is still None, if an option now asks for it.
    return all(
        is_per_element(value, parameter) or (value.numel() == 1 if torch.is_tensor(value) else value is not None)
        for value in state.values()
    )


class Chunks:
    """Steps the only parameter of a parameter group chunk by chunk.

    Args:
        optimizer: an optimizer whose group :func:`may_step_in_chunks` allows to be cut.
        index: the index of the parameter group.
        gradient: the gradient of the parameter.
        new: a function of (first, last) that returns the memory for the new values of the elements [first, last).
        finish: a function to call with (first, last) when that memory has the new values.
        update: what steps chunks in one pass, or None to have the optimizer step them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: int,
        gradient: "MasterGradient",
        new: Callable[[int, int], torch.Tensor],
        finish: Callable[[int, int], None],
        update: Optional["StepOfGroup"] = None,
    ):
        (self._whole,) = optimizer.param_groups[index]["params"]
        self._own = _OwnStep(optimizer, index)
        self._gradient, self._new, self._finish, self._update = gradient, new, finish, update
        self._spans = [(0, self._whole.numel())]  # what is left to do

    def step_first(self, spans: List[Tuple[int, int]]) -> bool:
        """Steps the elements in ``spans``, [first, last) in ascending order, before all others.

        Returns:
            whether these elements have been stepped. If the optimizer has to step a large parameter itself, it steps
            all elements in :meth:`step_rest`. It steps a small one whole at once.
        """
        numel = self._whole.numel()
        if self._update is None and numel < compiled_update.LEAST_NUMEL:
            spans = [(0, numel)]
        elif self._update is None:
            return not spans
        self._step(spans, self._gradient.split_off(spans))
        borders = [border for span in spans for border in span]
        self._spans = [*zip([0, *borders[1::2]], [*borders[::2], numel], strict=True)]
        return True

    def step_rest(self) -> None:
        """Steps all other elements, and the states that are no element's, such as counts of steps."""
        self._step(self._spans, self._gradient)
        (self._own if self._update is None else self._update).finish()

    def _step(self, spans, gradient):
        size = CHUNK_NUMEL_ON_HOST if self._whole.is_cpu else CHUNK_NUMEL
        for first, end in spans:
            while first < end:
                last = min(first + size, end)
                if self._update is not None:
                    # The optimizer itself steps the few elements before a multiple of ALIGN_NUMEL and after the last.
                    before = -first % ALIGN_NUMEL
                    last = min(first + before, end) if before else gradient.end_of_range(first, last)
                memory = self._new(first, last)
                if self._update is not None and first % ALIGN_NUMEL == 0 == last % ALIGN_NUMEL:
                    self._update.run(gradient.take_unscaled(first, last), gradient.factor, memory, first)
                else:
                    self._own.step(first, last, gradient.take(first, last))
                    memory.copy_(self._whole.data[first:last])
                self._finish(first, last)
                first = last


class _OwnStep:
    """Has an optimizer step its only parameter of a group chunk by chunk."""

    def __init__(self, optimizer, index):
        self._optimizer, self._index = optimizer, index
        (self._whole,) = optimizer.param_groups[index]["params"]
        self._state = optimizer.state.get(self._whole) or {}
        # In the first step, the optimizer makes the state of each chunk.
        self._is_new = not self._state

    def step(self, first, last, gradient):
        optimizer, groups, state = self._optimizer, self._optimizer.param_groups, self._state
        chunk = torch.nn.Parameter(self._whole.data[first:last])
        chunk.grad = gradient
        self._group = {**groups[self._index], "params": [chunk]}
        if not self._is_new:
            optimizer.state[chunk] = {name: _part(value, self._whole, first, last) for name, value in state.items()}
        optimizer.param_groups = [self._group]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
            self._of_chunk = optimizer.state.pop(chunk, {})
        if self._is_new:
            for name, value in self._of_chunk.items():
                if is_per_element(value, chunk):
                    if name not in state:
                        state[name] = value.new_empty(self._whole.shape)
                    state[name][first:last] = value

    def finish(self):
        optimizer, state = self._optimizer, self._state
        # The other states are counts of steps. Each chunk has counted this step, so take the counts of the last chunk.
        for name, value in self._of_chunk.items():
            if name not in state or not torch.is_tensor(value):
                state[name] = value
            elif not is_per_element(state[name], self._whole):
                state[name].copy_(value)
        if state:
            optimizer.state[self._whole] = state
        optimizer.param_groups[self._index].update(
            (name, value) for name, value in self._group.items() if name != "params"
        )


def _part(value, parameter, first, last):
    if is_per_element(value, parameter):
        return value[first:last]
    return value.clone() if torch.is_tensor(value) else value
