# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The updates of Adam and AdamW in an engine: the form of states and master weights, and the rules that step them."""

import weakref
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from ...zero_1_and_2.collectives import every_rank_raises
from ...zero_1_and_2.engine.state import EngineState
from ...zero_1_and_2.feature import Feature, Request, SetUpContext, only
from ...zero_1_and_2.parameter.gather import AllGather
from ...zero_1_and_2.step.even_order import EvenOrder
from ...zero_1_and_2.step.rule import Rule
from ..checkpoints.feature import Checkpoints
from . import refused
from .adam import OnePassAdam, RefuseOwnStep
from .eight_bit import EightBitAdam
from .masters import Masters
from .masters_in_optimizer import RemaindersOfParameters, use_remainders
from .own_ranges import OwnRanges
from .remainders_rule import EveryStepAdam, RemaindersAdam
from .states import StatesOfAdam


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
            yield from refused.unsupported_states(request)
        if request.options.store_param_remainders:
            yield from refused.unsupported_master_weights(request)

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
        self._links = context.get(Checkpoints).links
        self._optimizer, self._group = weakref.ref(optimizer), context.engine.seq_data_parallel_group

    def commit(self) -> None:
        optimizer = self._optimizer()
        # Ranks exchange elements here.
        self.states.adopt(optimizer)
        with every_rank_raises("convert optimizer states", self._group):
            # The links may lead to states in the form that they had.
            self._links.in_other_forms.append(self.states.link)
            self._links.link_again(optimizer)
            if self._masters is not None:
                use_remainders(optimizer, self._masters)
        if self._masters is not None:
            self._masters.send_parameters()

    def rules(self, others: List[Rule]) -> List[Rule]:
        rules = [*others, OwnRanges()]
        rules = [OnePassAdam(), *rules] if self.in_one_pass else rules
        if self._in_8_bits:
            rules = [EightBitAdam(), RefuseOwnStep("optimizer_states='8bit'")]
        if self._masters is not None:
            states = EightBitAdam() if self._in_8_bits else EveryStepAdam()
            rules = [RemaindersAdam(self._masters.remainders, states), RefuseOwnStep(refused.OPTION)]
        return rules

    @property
    def shares(self) -> Sequence[torch.Tensor]:
        return () if self._masters is None else self._masters.remainders


FEATURE = Update
