# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The updates of an engine: the form of states and master weights, and the rules that step them."""

import weakref
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch.nn import Embedding, EmbeddingBag

from ...zero_1_and_2.collectives import every_rank_raises
from ...zero_1_and_2.engine.state import EngineState
from ...zero_1_and_2.feature import Feature, Request, SetUpContext, only
from ...zero_1_and_2.parameter.gather import AllGather
from ...zero_1_and_2.step.even_order import EvenOrder
from ...zero_1_and_2.step.rule import Rule
from ..checkpoints.feature import Checkpoints
from . import muon_in_engine
from .adam import OnePassAdam, RefuseOwnStep, problem_with, unsupported_forms
from .every_step import THIRD_STATE, EightBitStep, EveryStepAdam
from .masters import Masters
from .masters_in_optimizer import RemaindersOfParameters, use_remainders
from .muon import is_muon
from .own_ranges import OwnRanges
from .states import StatesOfAdam

REMAINDERS = "store_param_remainders"


class FormOfStates(EvenOrder):
    """The methods of the base's ZeRO-1/2 optimizer that save and load states."""

    _deepcompile: EngineState

    def state_dict(self) -> Dict[str, Any]:
        return self._deepcompile.find(Update).states.as_saved(self, super().state_dict())

    def load_state_dict(self, *args, **kwargs) -> None:
        super().load_state_dict(*args, **kwargs)
        self._deepcompile.find(Update).states.adopt(self)


class Update(Feature):
    """Every engine has this part. Without options, loaded 8-bit states become fp32 states.

    Attributes:
        in_one_pass: whether a rule for Adam goes before the optimizer itself, which takes several passes over memory.
    """

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        if request.options.optimizer_states is not None:
            yield from _unsupported_states(request)
        if request.options.store_param_remainders:
            yield from _unsupported_master_weights(request)
        yield from muon_in_engine.refusals(request)

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        return muon_in_engine.warnings(request.engine.optimizer)

    optimizer_mixins: Tuple[type, ...] = (FormOfStates,)

    def __init__(self, context: SetUpContext):
        request, optimizer = context.request, context.optimizer
        self._in_8_bits = request.options.optimizer_states is not None
        self.in_one_pass = request.backend == "inductor" and request.compiles
        self.states = StatesOfAdam(in_8_bits=self._in_8_bits)
        # Check here, before any part frees memory.
        self.states.refuse_others(optimizer)
        self._masters: Optional[Masters] = None
        if request.options.store_param_remainders:
            self._masters = Masters(optimizer, only(context.features, "gather") or AllGather(optimizer))
            self.optimizer_mixins = (FormOfStates, RemaindersOfParameters)
        self.transform, self._has_muon = muon_in_engine.transform_of(context), is_muon(optimizer.optimizer)
        self._links = context.get(Checkpoints)
        self._optimizer, self._group = weakref.ref(optimizer), context.engine.seq_data_parallel_group

    def commit(self) -> None:
        optimizer = self._optimizer()
        # Ranks exchange elements here.
        self.states.adopt(optimizer)
        with every_rank_raises("convert optimizer states", self._group):
            # The links may lead to states in the form that they had.
            self._links.in_other_forms.append(self.states.link)
            self._links.link_again()
            if self._masters is not None:
                use_remainders(optimizer, self._masters)
        if self._masters is not None:
            self._masters.send_parameters()

    def rules(self, others: List[Rule]) -> List[Rule]:
        rules = [*others, OwnRanges()]
        rules = [OnePassAdam(), *rules] if self.in_one_pass else rules
        if self._in_8_bits or self._masters is not None:
            remainders = None if self._masters is None else self._masters.remainders
            asked = REMAINDERS if self._masters is not None else "optimizer_states='8bit'"
            rules = [EveryStepAdam(self._in_8_bits, remainders), RefuseOwnStep(asked)]
        return [muon_in_engine.StandIn(rules)] if self._has_muon else rules

    @property
    def shares(self) -> Sequence[torch.Tensor]:
        return () if self._masters is None else self._masters.remainders


FEATURE = Update


def _unsupported_states(request: Request) -> Iterator[str]:
    """Yields a sentence for each reason why an engine cannot have the states that ``optimizer_states`` asks for."""
    engine, option = request.engine, f"optimizer_states={request.options.optimizer_states!r}"
    asked = f"compile.{option}"
    yield from unsupported_forms(option, EightBitStep.problem_with, request, "states")
    by_configuration = {} if engine.client_optimizer is not None else engine.optimizer_params() or {}
    if request.optimizer is None and by_configuration.get("amsgrad"):
        yield f"{asked} {THIRD_STATE}, or leave compile.optimizer_states out"
    if engine.zero_elastic_checkpoint():
        yield (
            f"{asked} has no form in elastic checkpoints; set zero_optimization.elastic_checkpoint to false, or leave "
            "compile.optimizer_states out"
        )


def _unsupported_master_weights(request: Request) -> Iterator[str]:
    """Yields a sentence for each reason why an engine's master weights cannot be remainders."""
    yield from unsupported_forms(REMAINDERS, problem_with, request, "master weights")
    engine = request.engine
    dtype = engine.get_data_types()[0]
    # DeepSpeed casts the parameters when the engine begins, unless their dtype is to be fp32.
    stay = engine.optimizer is not None or dtype == torch.float32
    dtypes = ({parameter.dtype for parameter in request.trained} if stay else {dtype}) - {torch.bfloat16}
    if dtypes:
        yield (
            f"compile.{REMAINDERS} needs parameters in bf16, and there are some in {dtypes.pop()}; set bf16.enabled, "
            "or leave it out"
        )
    trained = {id(parameter) for parameter in request.trained}
    for name, submodule in engine.module.named_modules():
        is_embedding = isinstance(submodule, (Embedding, EmbeddingBag))
        if is_embedding and submodule.max_norm is not None and id(submodule.weight) in trained:
            # Ranks read different rows, and the master weights have those of the rank whose shard has a row.
            yield (
                f"compile.{REMAINDERS} needs parameters that all ranks change alike, and the forward of "
                f"{name or type(submodule).__name__} scales the rows that a rank reads down to its max_norm; set its "
                f"max_norm to None, or leave compile.{REMAINDERS} out"
            )
