# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Refuses, or warns of, DeepSpeed's own options and arguments of ``engine.compile()``."""

from typing import Iterator

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from . import experts
from .ignored import ignored
from .refused import refused
from .refused_calls import refused_calls


class UnsupportedOptions(Feature):
    """Refuses and warns of options of DeepSpeed. Other parts do so for their own options."""

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        yield from refused(request)
        yield from experts.refusals(request)
        if request.is_call:
            yield from refused_calls(request)

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        return ignored(request)

    def __init__(self, context: SetUpContext):
        # Turn the flops profiler off: on one rank it would replace functions that the compiler traces.
        profiler = context.engine._config.flops_profiler_config
        context.undo.callback(setattr, profiler, "enabled", profiler.enabled)
        profiler.enabled = False


FEATURE = UnsupportedOptions
