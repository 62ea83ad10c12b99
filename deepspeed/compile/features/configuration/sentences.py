# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Says in one sentence what is wrong with a section."""

import difflib
from typing import Type, get_args

from pydantic import BaseModel, ValidationError

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


def in_one_sentence(error: ValidationError, section: Type[BaseModel]) -> str:
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
