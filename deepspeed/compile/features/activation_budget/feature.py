# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a part of the activations that a backward needs, and computes the rest again."""

import weakref
from typing import Iterator, Sequence

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from .split import SplitWithin

# A buffer of at most so many elements may be copied for each layer and forward. Statistics and scales have fewer, and
# quantized weights, which are buffers in some packages, have more.
SMALL_BUFFER = 2**16


class ActivationBudget(Feature):
    """Splits joint graphs within the engine's budget, or, without one, within the budget of the process."""

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        budget = request.options.activation_memory_budget
        if budget is not None and not request.compiles:
            yield (
                f"compile.activation_memory_budget={budget} has no effect, because torch.compile is switched off by "
                "compile_kwargs['disable'] or TORCH_COMPILE_DISABLE"
            )

    def __init__(self, context: SetUpContext):
        self._budget = context.request.options.activation_memory_budget
        self._module = weakref.ref(context.module)
        context.backend.split = self.split

    def split(self, inputs: Sequence) -> SplitWithin:
        return SplitWithin(self._budget, self._small_buffers(inputs))

    def _small_buffers(self, inputs):
        """Returns the indices of inputs that are buffers of the model and small beside activations."""
        module = self._module()
        # Compare with None: a model's `__bool__` may raise.
        all_buffers = () if module is None else module.buffers()
        buffers = {id(buffer) for buffer in all_buffers if buffer.numel() <= SMALL_BUFFER}
        return tuple(index for index, value in enumerate(inputs) if id(value) in buffers)


FEATURE = ActivationBudget
