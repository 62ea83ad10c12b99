# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from typing import Any, List, Union

from pydantic import BaseModel, model_validator

# Options of other parts that work on blocks. If one is set, blocks become graphs also where a model calls them itself.
WORK_ON_BLOCKS = ("overlap_param_gather", "shard_parameters")


def set_for_blocks(options: Any) -> List[str]:
    """Lists the options of ``WORK_ON_BLOCKS`` that the section ``compile`` sets."""
    return [name for name in WORK_ON_BLOCKS if getattr(options, name, None)]


class Options(BaseModel):
    regional_compilation: Union[bool, List[str], None] = None
    """Whether each repeated block of the model becomes a graph of its own, compiled once for all layers. A list names
    the classes of the blocks. By default (null), blocks become graphs of their own if they are alike, if a module
    inside the model calls them, and if they hold most of that module's parameters, as in language models of
    transformers."""

    @model_validator(mode="after")
    def _has_blocks(self):
        if self.regional_compilation == []:
            raise ValueError("compile.regional_compilation names no classes; name some, or set it to true or false")
        if self.regional_compilation is False and set_for_blocks(self):
            raise ValueError(
                f"compile.{set_for_blocks(self)[0]} works on blocks; set compile.regional_compilation to true, or "
                "leave one of them out"
            )
        return self
