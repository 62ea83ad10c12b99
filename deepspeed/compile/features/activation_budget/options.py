# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from typing import Any, Optional

from pydantic import BaseModel, field_validator


class Options(BaseModel):
    activation_memory_budget: Optional[float] = None
    """The part of the activations that a graph may keep for its backward, from 0 to 1. The backward computes the rest
    again. The default (null) is ``torch._functorch.config.activation_memory_budget``, which is 1 unless the caller has
    set it."""

    @field_validator("activation_memory_budget", mode="before")
    @classmethod
    def _is_a_part(cls, value: Any) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value <= 1):
            raise ValueError(
                f"compile.activation_memory_budget={value!r} is not a part of the activations; set it to a number "
                "from 0 to 1, or leave it out"
            )
        return value
