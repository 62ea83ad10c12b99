# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Reads the section ``compile``, and says in one sentence what is wrong. This part has no option of its own."""

import difflib
from typing import Any, Dict, List, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError, model_validator

from ...parts import doors

# Options that have a meaning without DeepCompile, and in all stages.
ANYWHERE = {"memory_picture"}
# Prefix of the type of a problem of pydantic -> the values to set.
_EXPECTED = {
    "bool": "true or false",
    "float": "a number",
    "greater_than_equal": "{ge} or more",
    "int": "a whole number",
    "list": "a list",
    "literal": "{expected}",
    "enum": "{expected}",
    "model": "an object with {fields}",
    "string": "a text",
}


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
            problem = _in_one_sentence(error, type(self))
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


def _in_one_sentence(error, section):
    """Says one of the problems that pydantic found in the section ``compile``. ``section``: its class."""
    problems = error.errors()
    # Report an unknown name first: it may be a misspelling of a missing one.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    fields, path, field = section.model_fields, ["compile"], None
    for name in first["loc"]:
        # Skip entries that stand for a member of a union, which is no name in the configuration.
        if name in fields:
            path.append(str(name))
            field = fields[str(name)]
            fields = _fields_within(field.annotation)
    if first["type"] == "extra_forbidden":
        wrong = str(first["loc"][-1])
        near = difflib.get_close_matches(wrong.lower(), fields, n=1) or [name for name in fields if wrong in name]
        nearest = f"the nearest name is {near[0]}, and all names are" if near else "use one of these names"
        return f"{'.'.join([*path, wrong])} is not an option; {nearest}: {', '.join(sorted(fields))}"
    if first["type"] == "missing":
        return f"{'.'.join(path)} is missing; set it"
    # If no member of a union accepts a value, pydantic reports a problem for each member.
    same = [problem for problem in problems if problem["loc"][0] == first["loc"][0]]
    expected = " or ".join(dict.fromkeys(_expected(problem, fields) for problem in same))
    found = f" holds {first['input']!r}, which" if _is_of_an_item(first) else f"={first['input']!r}"
    leave_out = "" if field is None or field.is_required() else ", or leave it out"
    return f"{'.'.join(path)}{found} does not fit; set it to {expected}{leave_out}"


def _is_of_an_item(problem):
    return any(isinstance(name, int) for name in problem["loc"])


def _expected(problem, fields):
    """Says what to set in place of a wrong value, or of a wrong item of a list.

    ``fields``: the fields that the value should have.
    """
    words = next((words for kind, words in _EXPECTED.items() if problem["type"].startswith(kind)), "")
    words = words.format(fields=" and ".join(fields), **problem.get("ctx", {}))
    words = words or problem["msg"].removeprefix("Input should be ")
    return f"a list of {words.replace('a text', 'texts')}" if _is_of_an_item(problem) else words


def _fields_within(annotation):
    """Returns the fields of the section that an option may hold: name -> field."""
    kinds = (annotation, *get_args(annotation))
    return next((kind.model_fields for kind in kinds if hasattr(kind, "model_fields")), {})
