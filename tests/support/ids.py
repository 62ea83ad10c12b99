# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ids of tests, which name what the tests vary: ``stage1-acc3-RepeatedLayers-eager``."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, List

import pytest

_Parameters = type(pytest.param())

# What stands before a value, where that is not the argument's name (before numbers) or nothing (before words).
LABELS = {"accumulation": "acc", "world": "ranks", "accumulated_in": "into-"}
WORDS = {
    ("regional", True): "blocks",
    ("regional", False): "whole",
    ("regional_compilation", True): "blocks",
    ("regional_compilation", False): "whole",
    ("deepcompile", True): "DeepCompile",
    ("deepcompile", False): "DeepSpeed",
    ("rank", None): "every-rank",
}


def case_id(varied: Mapping[str, Any]) -> str:
    """Returns the id of a case from the values of its arguments, by name and in this order.

    A number follows its argument's name, a true flag is its name, a false one its name behind ``no-``. Strings,
    functions and classes stand for themselves, and a mapping for its items. None is left out: it is a default.
    """
    return "-".join(filter(None, (_part(name, value) for name, value in varied.items()))) or "default"


def _part(name: str, value: Any) -> str:
    if isinstance(value, (bool, type(None))) and (name, value) in WORDS:
        return WORDS[name, value]
    if value is None:
        return ""
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, (int, float)):
        return f"{LABELS.get(name, name)}{value}"
    if isinstance(value, Mapping):
        return case_id(value) if value else ""
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, value))
    return LABELS.get(name, "") + str(getattr(value, "__name__", value)).replace(" ", "-")


def case_ids(names: str, cases: Iterable[Any], expects: str = "") -> List[str]:
    """Returns the id of each case. The arguments are those of :func:`vary`."""
    separate = names.split(", ")
    named = [dict(zip(separate, _values(case, len(separate)), strict=True)) for case in cases]
    return [case_id({name: case[name] for name in separate if name not in expects.split(", ")}) for case in named]


def _values(case: Any, count: int) -> Sequence[Any]:
    if isinstance(case, _Parameters):
        return case.values
    return case if count > 1 else [case]


def vary(names: str, cases: Iterable[Any], expects: str = "", slow: Iterable[Any] = ()) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with ids from :func:`case_id`.

    The ids of stacked decorators are joined from the lowest decorator up, so the stage is best varied by the lowest.

    Args:
        names: the names of the arguments, separated by ", ".
        cases: for each case the value of the argument, or a tuple with one for each name, or either as
            ``pytest.param``.
        expects: those of the names that say what the test expects, and are not part of the ids.
        slow: further cases, as values or tuples, which get the mark ``slow``.
    """
    separate = names.split(", ")
    slow = [pytest.param(*_values(case, len(separate)), marks=pytest.mark.slow) for case in slow]
    cases = [*cases, *slow]
    return pytest.mark.parametrize(names, cases, ids=case_ids(names, cases, expects))


def sanitized(*values: Any):
    """A case that runs under sanitizers, of a test whose other cases call nothing else in the native code."""
    return pytest.param(*values, marks=pytest.mark.sanitized)
