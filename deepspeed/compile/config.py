# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The section ``compile`` of ``ds_config``: the base's options, and those of this fork's optional parts.

``docs/options.md`` says what each option does under ZeRO-1 and ZeRO-2. In these stages, an engine with ``deepcompile``
compiles itself before its first training forward.
"""

import importlib
import importlib.util
from typing import List

from pydantic import model_validator

from .config_base import CompileConfig as BaseCompileConfig
from .features import NAMES


def _options():
    """Lists the options of the parts that have any: a class of fields for each."""
    files = (f"{__package__}.features.{name}.options" for name in NAMES)
    return [importlib.import_module(file).Options for file in files if importlib.util.find_spec(file)]


_OPTIONS = _options()


class CompileConfig(*_OPTIONS, BaseCompileConfig):  # type: ignore[misc]
    """Settings of ``engine.compile()``."""

    @classmethod
    def for_zero_1_and_2(cls) -> List[str]:
        """Lists the options that only ZeRO-1 and ZeRO-2 can honour: all that this fork adds, except those that work
        without DeepCompile."""
        kinds = [options for options in _OPTIONS if not getattr(options, "WORKS_EVERYWHERE", False)]
        return [name for options in kinds for name in options.model_fields]

    def set_for_zero_1_and_2(self) -> List[str]:
        """Lists those of :meth:`for_zero_1_and_2` that are set."""
        # A number that is 0 is set.
        return [
            name for name in self.for_zero_1_and_2() if not any(getattr(self, name) is off for off in (None, False))
        ]

    def compiles_before_any_forward(self) -> bool:
        """Whether an option has all ranks make every forward together, and need a compiled engine for each."""
        names = [
            name
            for options in _OPTIONS
            if getattr(options, "NEED_EVERY_FORWARD", False)
            for name in options.model_fields
        ]
        return any(getattr(self, name) for name in names)

    @model_validator(mode="after")
    def _belong_to_zero_1_and_2(self):
        for name in self.set_for_zero_1_and_2():
            if set(self.passes or ()) - {"z1"}:
                raise ValueError(
                    f"compile.{name} goes with ZeRO-1 and ZeRO-2 only, not with compile.passes={self.passes}; leave "
                    "one of them out"
                )
        return self
