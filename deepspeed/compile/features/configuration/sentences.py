# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a section, in one sentence."""

import difflib
from typing import Type, get_args

from pydantic import BaseModel, ValidationError


def in_one_sentence(error: ValidationError, section: Type[BaseModel]) -> str:
    """Says one of the problems that pydantic found in the section ``compile``. ``section``: its class."""
    problems = error.errors()
    # An unknown name first, because it may be why another one is missing.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    fields, path = section.model_fields, ["compile"]
    for name in first["loc"]:
        # What stands for a member of a union, and not for a name in the configuration, is left out.
        if name in fields:
            path.append(str(name))
            fields = _fields_within(fields[str(name)].annotation)
    if first["type"] == "extra_forbidden":
        wrong = str(first["loc"][-1])
        (near,) = difflib.get_close_matches(wrong, fields, n=1, cutoff=0)
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
