# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The fixes of models' code, for one engine."""

from typing import Iterator

from ...features.blocks.feature import Blocks
from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from . import adapted_parameters, captured_outputs, dora, exchanges, experts_of_transformers, key_value_cache, liger


class ModelCode(Feature):
    """Mends the code of an engine's model. What it does to classes of libraries stays until the process ends."""

    @classmethod
    def warnings(cls, request: Request) -> Iterator[str]:
        yield from experts_of_transformers.advice(request.engine.module)

    def __init__(self, context: SetUpContext):
        dora.trace_unquantized_weights()
        adapted_parameters.trace_adapted_parameters()
        liger.keep_out_of_graphs()
        exchanges.keep_out_of_graphs(context.engine)
        blocks = context.get(Blocks)
        around = captured_outputs.traced_collection(context.module)
        if around is not None:
            blocks.wrap_calls(around, always=True)
        key_value_cache.train_without_cache(context.module, context.undo, blocks.in_training)


FEATURE = ModelCode
