# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which cases ``make test`` runs."""

import itertools
from pathlib import Path
from types import SimpleNamespace

from support.selection import TABLES, thin_out


def varied(name, fixtures=("ranks",), **values):
    """Items of a test with the product of these values, as pytest collects them; one item for no values."""
    for chosen in itertools.product(*values.values()):
        params = dict(zip(values, chosen))
        yield SimpleNamespace(
            nodeid=f"{name}{params}",
            path=Path("tests/test_some.py"),
            name=name,
            originalname=name,
            fixturenames=fixtures,
            callspec=SimpleNamespace(params=params) if params else None,
        )


def kept(*items):
    return [item.callspec and item.callspec.params for item in thin_out(list(items))]


def test_two_cases_that_differ_in_all_they_can():
    first, second = kept(*varied("test_a", stage=[1, 2], backend=["eager", "inductor"], model="abc"))
    assert all(first[name] != second[name] for name in first)


def test_a_test_without_ranks_or_without_values_is_run_as_it_is():
    assert len(kept(*varied("test_a", fixtures=(), stage=[1, 2], model="abc"))) == 6
    assert kept(*varied("test_b")) == [None]


def test_each_value_of_a_table_occurs():
    table = kept(*varied(min(TABLES), stage=[1, 2], model="abc"))
    assert {each["model"] for each in table} == set("abc") and {each["stage"] for each in table} == {1, 2}


def test_values_take_turns_from_test_to_test():
    tests = [varied(f"test_{number}", stage=[1, 2, 3]) for number in range(3)]
    assert {each["stage"] for each in kept(*itertools.chain(*tests))} == {1, 2, 3}


def test_tables_exist():
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in TABLES if f"def {name}(" not in source] == []
