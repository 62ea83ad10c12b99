# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Remainders in an engine: what is refused, and the rule that steps all partitions."""

from typing import Iterator, List, Sequence

import torch
from torch.nn import Embedding, EmbeddingBag

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.feature import Feature, Request, SetUpContext, only
from ...zero_1_and_2.parameter.gather import AllGather
from ...zero_1_and_2.step.rule import Rule
from ..one_pass_adam.adam import RefuseOwnStep, problem_with, unsupported_forms
from .masters import Masters
from .optimizer import RemaindersOfParameters, use_remainders
from .rule import RemaindersAdam

OPTION = "store_param_remainders"


class Remainders(Feature):
    """Keeps remainders in place of the master weights, and makes every step."""

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return request.options.store_param_remainders

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        if cls.is_wanted(request):
            yield from _unsupported(request)

    optimizer_mixin = RemaindersOfParameters

    def __init__(self, context: SetUpContext):
        gather = only(context.features, "gather") or AllGather(context.optimizer)
        self._masters = Masters(context.optimizer, gather)

    def commit(self) -> None:
        self._masters.take_apart()

    def attached(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        # Now, because the engine can no longer go on without DeepCompile, which needs the fp32 master weights.
        use_remainders(optimizer, self._masters)

    def rules(self, others: List[Rule]) -> List[Rule]:
        return [RemaindersAdam(self._masters.remainders, others), RefuseOwnStep(OPTION)]

    @property
    def shares(self) -> Sequence[torch.Tensor]:
        return self._masters.remainders


FEATURE = Remainders


def _unsupported(request):
    """Yields a sentence for each reason why an engine's master weights cannot be remainders."""
    yield from unsupported_forms(OPTION, problem_with, request, "master weights")
    engine = request.engine
    dtype = engine.get_data_types()[0]
    # DeepSpeed casts the parameters when the engine begins, unless their dtype is to be fp32.
    stay = engine.optimizer is not None or dtype == torch.float32
    dtypes = ({parameter.dtype for parameter in request.trained} if stay else {dtype}) - {torch.bfloat16}
    if dtypes:
        yield (
            f"compile.{OPTION} needs parameters in bf16, and there are some in {dtypes.pop()}; set bf16.enabled, or "
            "leave it out"
        )
    trained = {id(parameter) for parameter in request.trained}
    for name, submodule in engine.module.named_modules():
        is_embedding = isinstance(submodule, (Embedding, EmbeddingBag))
        if is_embedding and submodule.max_norm is not None and id(submodule.weight) in trained:
            # Ranks read different rows, and the master weight has the owner's.
            yield (
                f"compile.{OPTION} needs parameters that all ranks change alike, and the forward of "
                f"{name or type(submodule).__name__} scales the rows that a rank reads down to its max_norm; set its "
                f"max_norm to None, or leave compile.{OPTION} out"
            )
