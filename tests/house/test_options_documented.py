# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``docs/reference/options.md`` lists every option, and says of each what the tests show.

The page is held against the fields that DeepSpeed has, the tables of the tests, and the marks ``options`` of tests.
"""

import ast
import functools
import inspect
import itertools
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.documentation import documented
from support.options import ALSO_WARNED

TESTS = Path(__file__).resolve().parents[1]
UNSUPPORTED = TESTS / "features" / "configuration"


def tables(path):
    """Returns the names that a file of tests defines."""
    return SimpleNamespace(**runpy.run_path(str(path)))


@pytest.mark.quick
def test_every_field_is_documented():
    """A new DeepSpeed would have an option of which nobody has looked at what DeepCompile does with it."""
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    names = set(documented())
    for section, config in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("compile", CompileConfig),
        ("bf16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
    ):
        fields = {f"{section}.{field.alias or name}" for name, field in config.model_fields.items()}
        there = {name for name in names if name.startswith(f"{section}.")}
        assert fields - there == set(), "docs/reference/options.md lacks these"
        assert there - fields == set(), "docs/reference/options.md has these, which DeepSpeed does not know"


@pytest.mark.quick
def test_every_argument_of_compile_is_documented():
    """A new torch would have an argument of which nobody has looked at what DeepCompile does with it."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    names = set(documented())
    assert {*inspect.signature(DeepSpeedEngine.compile).parameters} - {"self", "compile_kwargs"} - names == set()
    arguments = {f"compile_kwargs.{name}" for name in inspect.signature(torch.compile).parameters}
    assert arguments - {"compile_kwargs.model"} - names == set(), "docs/reference/options.md lacks these"


@pytest.mark.quick
def test_what_is_warned_of_is_documented_as_warned():
    """The page would promise a warning that no test has seen, or not tell of one."""
    rows, warned = documented(), tables(UNSUPPORTED / "test_options_warned.py").WARNED
    assert {name for name, row in rows.items() if "Warned" in row} == {*warned, *ALSO_WARNED}


@pytest.mark.quick
def test_what_is_refused_is_documented_as_refused():
    """The page would promise a refusal that no test has seen, or not tell of one."""
    rows = documented()
    refused = {name for name, row in rows.items() if re.search("refused(?! by DeepSpeed)", row, re.IGNORECASE)}
    engines = tables(UNSUPPORTED / "test_refused_engines.py").REFUSED_ENGINES
    files = [UNSUPPORTED / "test_options_refused.py", *UNSUPPORTED.parent.glob("*/refused.py")]
    assert refused == {*engines, *itertools.chain.from_iterable(tables(path).REFUSED for path in files)}
    by_deepspeed = {name for name, row in rows.items() if re.search("refused by DeepSpeed", row, re.IGNORECASE)}
    assert by_deepspeed == {*tables(UNSUPPORTED / "test_options_refused_by_deepspeed.py").REFUSED_BY_DEEPSPEED}


def harmless():
    """Returns the names of the options with which ``test_harmless`` trains."""
    honoured = tables(TESTS / "core" / "test_options_honoured.py")
    given, of_zero = honoured.HARMLESS, {**honoured.HARMLESS["zero_optimization"], **honoured.ALSO_HARMLESS}
    sections = {"zero_optimization": of_zero, "compile": given["compile"]}
    names = {f"{section}.{name}" for section, of_section in sections.items() for name in of_section}
    return names | given.keys() - {*sections, "fp16"}


@functools.cache
def marked():
    """Returns the names of the options that marks of tests and of files have."""
    marks = [
        mark
        for path in sorted(TESTS.rglob("test_*.py"))
        for mark in re.findall(r"(?ms)^(?:@|pytestmark = )(pytest\.mark\.options\(.*?\))$", path.read_text())
    ]
    return {ast.literal_eval(name) for mark in marks for name in ast.parse(mark, mode="eval").body.args}


@pytest.mark.quick
def test_what_has_no_effect_is_documented_so():
    """The page would say of an option that it has no effect, and no test would have trained with it."""
    rows = documented()
    without = {name for name, row in rows.items() if re.match("No effect|Stage 3", row)}
    assert without - harmless() - marked() == set()
    assert harmless() - rows.keys() == set()


@pytest.mark.quick
def test_every_honoured_option_has_a_test():
    """The page would promise an option with which no test trains, or a mark would name one that is gone."""
    rows = documented()
    promised = {name for name, row in rows.items() if "Honoured" in row}
    assert promised - harmless() - marked() == set()
    assert marked() - rows.keys() == set()
