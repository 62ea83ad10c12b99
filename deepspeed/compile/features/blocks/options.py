# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from typing import List, Union

from pydantic import BaseModel, model_validator


class Options(BaseModel):
    regional_compilation: Union[bool, List[str], None] = None
    """Whether each repeated block of the model becomes a graph of its own, compiled once for all layers. A list names
    the classes of the blocks. By default (null), blocks become graphs of their own if they are alike, if a module
    inside the model calls them, and if they hold most of that module's parameters, as in language models of
    transformers."""

    @model_validator(mode="after")
    def _names_classes(self):
        if self.regional_compilation == []:
            raise ValueError("compile.regional_compilation names no classes; name some, or set it to true or false")
        return self
