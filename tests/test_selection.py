# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which tests and cases ``make test``, ``make quick`` and ``make test-gpu`` run."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.pool import TESTS
from support.selection import WITHOUT_A_GPU, keep_one_quick_case, keep_what_uses_gpus, thin_out


class Item(SimpleNamespace):
    """What pytest collects, as far as the selection looks at it."""

    def get_closest_marker(self, name):
        return next((mark for mark in self.own_markers if mark.name == name), None)


def varied(name, fixtures=("ranks",), marks=(), **values):
    """Items of a test with the product of these values, as pytest collects them; one item for no values."""
    for chosen in itertools.product(*values.values()):
        params = dict(zip(values, chosen))
        yield Item(
            nodeid=f"{name}{params}",
            path=Path("tests/test_some.py"),
            name=name,
            originalname=name,
            fixturenames=fixtures,
            own_markers=[getattr(pytest.mark, mark).mark for mark in marks],
            callspec=SimpleNamespace(params=params) if params else None,
        )


def kept(*items):
    return [item.callspec and item.callspec.params for item in thin_out(list(items))]


def quick(*items):
    keep_one_quick_case(items)
    return [item.callspec and item.callspec.params for item in items if item.get_closest_marker("quick")]


def test_two_cases_that_differ_in_all_they_can():
    first, second = kept(*varied("test_a", stage=[1, 2], backend=["eager", "inductor"], model="abc"))
    assert all(first[name] != second[name] for name in first)


def test_a_test_without_ranks_or_without_values_is_run_as_it_is():
    assert len(kept(*varied("test_a", fixtures=(), stage=[1, 2], model="abc"))) == 6
    assert kept(*varied("test_b")) == [None]


def test_each_value_of_a_table_occurs():
    table = kept(*varied("test_a", marks=["table"], stage=[1, 2], model="abc"))
    assert {each["model"] for each in table} == set("abc") and {each["stage"] for each in table} == {1, 2}


def test_values_take_turns_from_test_to_test():
    tests = [varied(f"test_{number}", stage=[1, 2, 3]) for number in range(6)]
    pairs = [frozenset(each["stage"] for each in kept(*test)) for test in tests]
    assert set(pairs) == set(map(frozenset, itertools.combinations([1, 2, 3], 2)))


@pytest.mark.parametrize("marks", [(), ("table",)], ids=["two cases", "table"])
def test_no_test_changes_what_another_covers(marks):
    """Nor does it matter in which order pytest collects the cases."""
    others = [varied(name, stage=[1, 2], backend=["eager", "inductor"], model="abc") for name in "bcdefg"]
    test = list(varied("test_a", marks=marks, stage=[1, 2], backend=["eager", "inductor"], model="abc"))
    among_others = thin_out([*itertools.chain(*others), *reversed(test)])
    assert {item.nodeid for item in among_others if item.name == "test_a"} == {item.nodeid for item in thin_out(test)}


def test_one_quick_case_of_each_test_generates_no_code():
    tests = [varied(name, marks=["sanitized", "quick"], backend=["inductor", "eager"], stage=[1, 2]) for name in "ab"]
    items = list(itertools.chain(*tests, varied("c", stage=[1, 2])))
    assert quick(*items) == 2 * [{"backend": "eager", "stage": 1}]
    assert sum(item.get_closest_marker("sanitized") is not None for item in items) == 8


def test_a_quick_test_without_ranks_or_without_values_is_run_as_it_is():
    assert len(quick(*varied("test_a", fixtures=(), marks=["quick"], backend=["inductor", "eager"]))) == 2
    assert quick(*varied("test_b", marks=["quick"])) == [None]


def test_files_that_use_no_gpu_are_left_out_and_are_there():
    files = ["test_some.py", *WITHOUT_A_GPU, "test_other.py"]
    kept_files = [item.path.name for item in keep_what_uses_gpus([Item(path=TESTS / name) for name in files])]
    assert kept_files == ["test_some.py", "test_other.py"]
    assert [name for name in WITHOUT_A_GPU if not (TESTS / name).is_file()] == []
