# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Refuses, or warns of, settings that 8-bit states and master weights as remainders do not support."""

from typing import Iterator

import torch
from torch.nn import Embedding, EmbeddingBag

from ...zero_1_and_2.feature import Request
from . import adam, eight_bit

OPTION = "store_param_remainders"


def unsupported_states(request: Request) -> Iterator[str]:
    """Yields a sentence for each reason why an engine cannot have the states that ``optimizer_states`` asks for."""
    engine, option = request.engine, f"optimizer_states={request.options.optimizer_states!r}"
    asked = f"compile.{option}"
    yield from adam.unsupported_forms(option, eight_bit.problem_with, request, "states")
    by_configuration = {} if engine.client_optimizer is not None else engine.optimizer_params() or {}
    if request.optimizer is None and by_configuration.get("amsgrad"):
        yield f"{asked} {eight_bit.THIRD_STATE}, or leave compile.optimizer_states out"
    if engine.zero_elastic_checkpoint():
        yield (
            f"{asked} has no form in elastic checkpoints; set zero_optimization.elastic_checkpoint to false, or leave "
            "compile.optimizer_states out"
        )


def unsupported_master_weights(request: Request) -> Iterator[str]:
    """Yields a sentence for each reason why an engine's master weights cannot be remainders."""
    yield from adam.unsupported_forms(OPTION, adam.problem_with, request, "master weights")
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
            # Ranks read different rows, and the master weights have those of the rank whose shard has a row.
            yield (
                f"compile.{OPTION} needs parameters that all ranks change alike, and the forward of "
                f"{name or type(submodule).__name__} scales the rows that a rank reads down to its max_norm; set its "
                f"max_norm to None, or leave compile.{OPTION} out"
            )
