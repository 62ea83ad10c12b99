# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The section ``compile`` of ``ds_config``: the base's options, and those that this fork adds.

``docs/options.md`` says what each option does under ZeRO-1 and ZeRO-2. In these stages, an engine with ``deepcompile``
compiles itself before its first training forward.
"""

import importlib
import importlib.util
from typing import Any, List, Literal, Optional, Union

from pydantic import Field, field_validator, model_validator

from deepspeed.runtime.config_utils import DeepSpeedConfigModel

from .config_base import CompileConfig as BaseCompileConfig
from .features import NAMES


class MemoryPictureConfig(DeepSpeedConfigModel):
    """Which step's memory to draw, and where to. ``docs/memory_picture.md`` explains the pictures."""

    folder: str
    """The folder for the pictures and for the data. It is made if it does not exist."""

    step: int = Field(3, ge=1)
    """Which of the engine's steps to record, counted from 1. With DeepCompile, steps count from when the engine is
    compiled. The first step compiles and the second may compile again, so the third is the first one that is like all
    later ones."""


def _options():
    """Lists the options of the parts that have any: a class of fields for each."""
    files = (f"{__package__}.features.{name}.options" for name in NAMES)
    return [importlib.import_module(file).Options for file in files if importlib.util.find_spec(file)]


class CompileConfig(*_options(), BaseCompileConfig):  # type: ignore[misc]
    """Settings of ``engine.compile()``. The options here are for ZeRO-1 and ZeRO-2."""

    regional_compilation: Union[bool, List[str], None] = None
    """Whether each repeated block of the model becomes a graph of its own, compiled once for all layers. A list names
    the classes of the blocks. By default (null), blocks become graphs of their own if they are alike, if a module
    inside the model calls them, and if they hold most of that module's parameters, as in language models of
    transformers."""

    overlap_param_gather: bool = False
    """Whether the next forward begins while updated parameters are still being gathered. Each block then waits for its
    own parameters, so this option needs regional compilation. Off by default, because code that reads a parameter
    between a step and the next forward must first call ``deepspeed.compile.zero12.wait_for_parameters(engine)``."""

    chunked_loss: Optional[bool] = None
    """Whether the backward computes the gradient of a language model's logits in chunks, so that it never exists as a
    whole. By default (null), it does so from 2^30 logits on, where chunks save memory and cost little time."""

    activation_memory_budget: Optional[float] = None
    """How much of the activations that a graph would keep for its backward it may keep, from 0 to 1. The backward
    computes the rest again. By default (null), ``torch._functorch.config.activation_memory_budget`` says it, which is
    1 unless the caller has set it."""

    optimizer_states: Optional[Literal["8bit"]] = None
    """The format of Adam's two states. "8bit" keeps them in a byte an element, with a scale for each 256 elements. By
    default (null), the optimizer keeps them as it does without DeepCompile."""

    shard_frozen: bool = False
    """Whether each rank keeps only a part of the blocks' frozen parameters, and gets the rest just before a block uses
    them, as for LoRA of a model that does not fit. This needs regional compilation. Off by default, because all ranks
    must then evaluate together, and read frozen parameters only in
    ``deepspeed.compile.zero12.gathered_parameters(engine)``."""

    memory_picture: Optional[MemoryPictureConfig] = None
    """Has one step recorded, and pictures of its memory drawn: a PNG file, a page for a browser, and the data. By
    default (null), nothing is recorded. The only option here that also works without ``deepcompile``, so that two
    pictures can be laid over each other."""

    @field_validator("activation_memory_budget", mode="before")
    @classmethod
    def _budget_is_a_part(cls, value: Any) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value <= 1):
            raise ValueError(f"compile.activation_memory_budget={value!r} is not a number from 0 to 1; set it to one")
        return value

    def set_for_zero_1_and_2(self) -> List[str]:
        """Returns the names of the options that are set and that only ZeRO-1 and ZeRO-2 can honour.

        These are all options that this class adds to the base's, except the one that works without DeepCompile.
        """
        added = [name for name in type(self).model_fields if name not in BaseCompileConfig.model_fields]
        # A budget of 0 is set.
        return [
            name
            for name in added
            if name != "memory_picture" and not any(getattr(self, name) is off for off in (None, False))
        ]

    @model_validator(mode="after")
    def _blocks_belong_to_zero_1_and_2(self):
        if self.regional_compilation == []:
            raise ValueError("compile.regional_compilation names no classes; name some, or set it to true or false")
        for name in self.set_for_zero_1_and_2():
            if not self.deepcompile:
                raise ValueError(
                    f"compile.{name} belongs to DeepCompile; set compile.deepcompile to true or leave it out"
                )
            if set(self.passes or ()) - {"z1"}:
                raise ValueError(
                    f"compile.{name} goes with ZeRO-1 and ZeRO-2 only, not with compile.passes={self.passes}; leave "
                    "one of them out"
                )
        if self.overlap_param_gather and self.regional_compilation is False:
            raise ValueError(
                "compile.overlap_param_gather needs blocks that wait for their parameters; set "
                "compile.regional_compilation to true, or leave one of them out"
            )
        if self.shard_frozen and self.regional_compilation is False:
            raise ValueError(
                "compile.shard_frozen needs blocks whose parameters are gathered; set compile.regional_compilation to "
                "true, or leave one of them out"
            )
        return self
