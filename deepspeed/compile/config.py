# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The section ``compile`` of ``ds_config``: the base's options, and those of this fork's optional parts.

``docs/options.md`` says what each option does under ZeRO-1 and ZeRO-2. In these stages, an engine with ``deepcompile``
compiles itself before its first training forward.
"""

import difflib
import importlib
import importlib.util
from typing import Any, List, get_args

from pydantic import TypeAdapter, ValidationError, model_validator

from .config_base import CompileConfig as BaseCompileConfig
from .features import NAMES


def _options():
    """Lists the options of the parts that have any: a class of fields for each."""
    files = (f"{__package__}.features.{name}.options" for name in NAMES)
    return [importlib.import_module(file).Options for file in files if importlib.util.find_spec(file)]


_OPTIONS = _options()


def _set_for_zero_1_and_2(section):
    """Lists which of this fork's options a section sets, except those that work without DeepCompile."""
    added = [
        name
        for options in _OPTIONS
        if not getattr(options, "WORKS_EVERYWHERE", False)
        for name in options.model_fields
    ]
    # A number that is 0 is set. DeepSpeed leaves out what is "auto".
    return [name for name in added if not any(section.get(name) is off for off in (None, False, "auto"))]


def _is_on(value):
    """Whether a value of ``deepcompile`` is true. Pydantic takes some texts and numbers for it too."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return False


def _in_one_sentence(error, section):
    """Says one of the problems that pydantic found in a section. ``section``: its class."""
    problems = error.errors()
    # An unknown name first, because it may be why another one is missing.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    # What stands for a member of a union, and not for a name in the configuration, is left out.
    fields, path = section.model_fields, ["compile"]
    for name in first["loc"]:
        if name in fields:
            path.append(name)
            fields = _fields_within(fields[name].annotation)
    if first["type"] == "extra_forbidden":
        wrong = first["loc"][-1]
        near = difflib.get_close_matches(wrong, fields, n=1, cutoff=0)[0]
        names = ", ".join(sorted(fields))
        return f"{'.'.join([*path, wrong])} is no option; the nearest name is {near}, and all names are: {names}"
    if first["type"] == "missing":
        return f"{'.'.join(path)} is missing; set it"
    # A value that no member of a union takes is a problem for each of them.
    expected = [problem["msg"] for problem in problems if problem["loc"][0] == first["loc"][0]]
    return f"{'.'.join(path)}={first['input']!r} does not fit: {' or '.join(expected)}"


def _fields_within(annotation):
    """Returns the fields of the section that an option may hold: name -> field."""
    kinds = (annotation, *get_args(annotation))
    return next((kind.model_fields for kind in kinds if hasattr(kind, "model_fields")), {})


class CompileConfig(*_OPTIONS, BaseCompileConfig):  # type: ignore[misc]
    """Settings of ``engine.compile()``."""

    def __init__(self, strict: bool = False, **data: Any):
        ignored = [] if _is_on(data.get("deepcompile")) else _set_for_zero_1_and_2(data)
        # Left out before they are read: what has no effect is not refused, whatever its value.
        data = {name: value for name, value in data.items() if name not in ignored}
        try:
            super().__init__(strict=strict, **data)
        except ValidationError as error:
            problem = _in_one_sentence(error, type(self))
        else:
            problem = None
        if problem:
            # Outside of the handler, so that pydantic's error, which says no more, is not printed too.
            raise ValueError(problem)
        if ignored:
            # Imported here, because that package imports DeepSpeed's engine's files, and these import this file.
            from .zero_1_and_2.messages import warn

            names = ", ".join(f"compile.{name}" for name in ignored)
            have = "have" if len(ignored) > 1 else "has"
            warn(f"{names} {have} no effect, because compile.deepcompile is not true; training is that of DeepSpeed")

    def set_for_zero_1_and_2(self) -> List[str]:
        """Returns the names of the options that are set and that only ZeRO-1 and ZeRO-2 can honour.

        These are all options that this fork adds, except those that work without DeepCompile.
        """
        return _set_for_zero_1_and_2(dict(self))

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
