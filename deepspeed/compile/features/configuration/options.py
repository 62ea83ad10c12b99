# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Reads the section ``compile``. This part has no option of its own."""

from typing import Any, Dict, List

from pydantic import BaseModel, TypeAdapter, ValidationError, model_validator

from ...parts import doors
from .sentences import in_one_sentence

# Options that have a meaning without DeepCompile, and in all stages.
ANYWHERE = {"memory_picture"}


class Options(BaseModel):
    # This class is CompileConfig's first base, so this function gets the section first.
    def __init__(self, strict: bool = False, **data: Any):
        """Reads a section.

        Raises:
            ValueError: for a name or a value that the section cannot have, in one sentence.
        """
        ignored = [] if _is_on(data.get("deepcompile")) else _set_for_zero_1_and_2(data)
        # Drop these options before validation: an option without effect is not refused, whatever its value.
        read = {name: value for name, value in data.items() if name not in ignored}
        problem = ""
        try:
            super().__init__(strict=strict, **read)
        except ValidationError as error:
            problem = in_one_sentence(error, type(self))
        if problem:
            # Raise outside of the handler, so that pydantic's longer error is not printed too.
            raise ValueError(problem)
        if ignored:
            # Import here: that package imports files of DeepSpeed's engine, which import this file.
            from ...zero_1_and_2.messages import warn

            names, have = ", ".join(f"compile.{name}" for name in ignored), "have" if len(ignored) > 1 else "has"
            warn(f"{names} {have} no effect, because compile.deepcompile is not true; training is that of DeepSpeed")

    @classmethod
    def of(cls, section: Any) -> "Options":
        """Called when DeepSpeed reads its configuration. Returns the options of the section ``compile``.

        Raises:
            ValueError: as ``__init__()``, and if ``section`` is no dict.
        """
        if not isinstance(section, dict):
            raise ValueError(f'compile={section!r} is not a section; set it to one such as {{"deepcompile": true}}')
        return cls(**section)

    @classmethod
    def refuse_elsewhere(cls, config: Dict[str, Any]) -> None:
        """Called with a whole configuration of DeepSpeed, which ignores unknown names at its top level.

        Raises:
            ValueError: if an option of the section ``compile`` stands outside of this section.
        """
        names = {"deepcompile"}.union(*(options.model_fields for options in doors("options", "Options")))
        for section in ("", "zero_optimization"):
            found = config.get(section) if section else config
            for name in names.intersection(found if isinstance(found, dict) else ()):
                where = f"in {section}" if section else "at the top level"
                raise ValueError(
                    f"{name} stands {where} of the configuration, where it has no effect; move it to compile"
                )

    def set_for_zero_1_and_2(self) -> List[str]:
        """Lists the set options that only ZeRO-1 and ZeRO-2 can honour."""
        return _set_for_zero_1_and_2(vars(self))

    @model_validator(mode="after")
    def _belong_to_zero_1_and_2(self):
        passes = getattr(self, "passes", None)
        for name in self.set_for_zero_1_and_2():
            if set(passes or ()) - {"z1"}:
                raise ValueError(
                    f"compile.{name} goes with ZeRO-1 and ZeRO-2 only, not with compile.passes={passes}; leave one of "
                    "them out"
                )
        return self


def _set_for_zero_1_and_2(section):
    """Lists the options set in a section (name -> value) that only ZeRO-1 and ZeRO-2 under DeepCompile can honour: all
    that this fork adds, except those that work without DeepCompile."""
    names = (name for options in doors("options", "Options") for name in options.model_fields if name not in ANYWHERE)
    # The number 0 counts as set. DeepSpeed drops "auto".
    return [name for name in names if not any(section.get(name) is off for off in (None, False, "auto"))]


def _is_on(value):
    """Whether a value of ``deepcompile`` is true. Pydantic accepts some texts and numbers as true."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return False
