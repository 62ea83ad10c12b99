# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Checks an engine's options for DeepCompile ZeRO-1/2.

:func:`check_options` refuses an option if the engine would train in another way, or in other memory, than the user
asked for. Each error is one sentence. Optional parts refuse and warn of options too, and one part makes
``deepspeed.initialize()`` refuse whatever no argument of ``engine.compile()`` could mend.
``docs/reference/options.md`` lists every option with its effect.
"""

import itertools
from typing import Iterable, Iterator, Optional

import torch
from packaging.version import Version

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..feature import Request, classes
from ..messages import warn
from ..step.even_order import even_class
from .state import state_of

OLDEST_TORCH = "2.11"


def check_options(request: Request) -> None:
    """Checks the options of an engine without changing it, and warns of each option without effect in this stage.

    Raises:
        ValueError: for the first option that cannot be honoured.
    """
    error = refusal(request, problems_of(request))
    if error is not None:
        raise error
    for ignored in itertools.chain.from_iterable(cls.warnings(request) for cls in classes()):
        warn(_beginning(request.engine) + ignored)


def refusal(request: Request, problems: Iterable[str]) -> Optional[ValueError]:
    """Returns the error for the first of some problems, or None if there is none.

    The caller raises it, so that few frames of a traceback stand between the user's code and the sentence.
    """
    return next((ValueError(_beginning(request.engine) + problem) for problem in problems), None)


def _beginning(engine):
    return f"DeepCompile with ZeRO stage {engine.zero_optimization_stage()}: "


def overlaps_reduction(request: Request) -> bool:
    """Whether buckets may travel while the backward goes on: unless ``overlap_comm`` or ``double_buffer`` is false."""
    # The parsed section cannot tell "false" from "not given": its validator sets the field in both cases.
    section = request.engine._config._param_dict.get("zero_optimization")
    asked_not_to = isinstance(section, dict) and section.get("overlap_comm") is False
    return request.options.double_buffer and not asked_not_to


def problems_of(request: Request) -> Iterator[str]:
    """Yields a sentence for each option that cannot be honoured."""
    # NVIDIA's images have a torch such as 2.11.0a0, which is before 2.11 and has what it has.
    if Version(torch.__version__).release[:2] < Version(OLDEST_TORCH).release[:2]:
        yield f"torch {torch.__version__} is too old; install torch {OLDEST_TORCH} or newer"
    yield from itertools.chain.from_iterable(cls.refusals(request) for cls in classes())
    # Report this last: an earlier error is usually the real cause.
    optimizer = request.engine.optimizer
    if state_of(request.engine) is not None:
        yield "an earlier engine.compile() failed half-way; create a new engine"
    elif optimizer is not None and type(optimizer) not in (DeepSpeedZeroOptimizer, even_class(DeepSpeedZeroOptimizer)):
        yield f"optimizer wrapper {type(optimizer).__name__} is not supported; set compile.deepcompile to false"
