# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from typing import List, Union

from pydantic import BaseModel, model_validator

# Marks the type of an option that works on blocks, in the part that has the option. If such an option is set, blocks
# become graphs also where a model calls them itself.
WORKS_ON_BLOCKS = "works on blocks"


def set_for_blocks(options: BaseModel) -> List[str]:
    """Lists the options with the mark ``WORKS_ON_BLOCKS`` that the section ``compile`` sets."""
    fields = type(options).model_fields.items()
    return [name for name, field in fields if WORKS_ON_BLOCKS in field.metadata and getattr(options, name)]


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
