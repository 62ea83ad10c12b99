# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""8-bit states in an engine: what is refused, and the rule that steps all partitions."""

import math
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.step.rule import Rule
from ..one_pass_adam.adam import RefuseOwnStep, unsupported_forms
from .eight_bit import THIRD_STATE, EightBitAdam, problem_with
from .states import StatesOfAdam

if TYPE_CHECKING:
    # attach() puts the mixin before this class at run time.
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as _NextClass

    from ...zero_1_and_2.engine.state import EngineState
else:
    _NextClass = object


class SavesStates(_NextClass):
    """The methods of the base's ZeRO-1/2 optimizer that save and load states."""

    _deepcompile: "EngineState"

    def state_dict(self) -> Dict[str, Any]:
        return self._deepcompile.find(EightBit).states.as_saved(self, super().state_dict())

    def load_state_dict(self, *args, **kwargs) -> None:
        super().load_state_dict(*args, **kwargs)
        self._deepcompile.find(EightBit).states.adopt(self)


class EightBit(Feature):
    """Also of an engine without the option, which may load states in 8 bits: these become fp32 states."""

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        if request.options.optimizer_states is not None:
            yield from _unsupported(request)

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        yield from _states_that_stay_in_fp32(request.engine.optimizer)

    optimizer_mixin = SavesStates

    def __init__(self, context: SetUpContext):
        self._is_asked = context.request.options.optimizer_states is not None
        self.states = StatesOfAdam(in_8_bits=self._is_asked)
        # Now, because no part has given anything up yet.
        self.states.refuse_others(context.optimizer)
        self._optimizer: Optional[DeepSpeedZeroOptimizer] = context.optimizer

    def commit(self) -> None:
        self.states.adopt(self._optimizer)
        del self._optimizer

    def link_states(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        self.states.link(optimizer)

    def rules(self, others: List[Rule]) -> List[Rule]:
        return [EightBitAdam(), RefuseOwnStep("optimizer_states='8bit'")] if self._is_asked else others


FEATURE = EightBit


def _unsupported(request):
    """Yields a sentence for each reason why an engine cannot have the states that ``optimizer_states`` asks for."""
    engine, option = request.engine, f"optimizer_states={request.options.optimizer_states!r}"
    asked = f"compile.{option}"
    yield from unsupported_forms(option, problem_with, request, "states")
    by_configuration = {} if engine.client_optimizer is not None else engine.optimizer_params() or {}
    if request.optimizer is None and by_configuration.get("amsgrad"):
        yield f"{asked} {THIRD_STATE}, or leave compile.optimizer_states out"
    if engine.zero_elastic_checkpoint():
        yield (
            f"{asked} has no form in elastic checkpoints; set zero_optimization.elastic_checkpoint to false, or leave "
            "compile.optimizer_states out"
        )


def _states_that_stay_in_fp32(optimizer):
    """Yields a sentence if there are partitions of which torchao quantizes no states, and says nothing."""
    inner = optimizer.optimizer
    if not (type(inner).__module__.startswith("torchao.") and hasattr(inner, "block_size")):
        return
    # Of fewer elements than 4096 it quantizes none by design.
    sizes = [numel for master in optimizer.single_partition_of_fp32_groups if (numel := master.numel()) >= 4096]
    divides_all = math.gcd(inner.block_size, *sizes)
    if divides_all < inner.block_size:
        remedy = f"give it block_size={divides_all}"
        if divides_all < 64:
            # Each block has a scale in fp32, so that states in small blocks save little.
            remedy = "leave it so, or use Adam or AdamW of torch with compile.optimizer_states='8bit'"
        uncut = ", ".join(str(numel) for numel in sizes if numel % inner.block_size)
        yield (
            f"{type(inner).__name__} of torchao keeps states in fp32, because its block_size={inner.block_size} does "
            f"not divide partitions of {uncut} elements; {remedy}"
        )
