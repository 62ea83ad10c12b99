# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which tests and cases ``make test``, ``make quick`` and ``make test-gpu`` run."""

import ast
import itertools
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from support import cpu_budget, selection
from support.pool import TESTS
from support.selection import (
    PARTS,
    ROOT,
    SHARES,
    WITHOUT_A_GPU,
    changed_files,
    keep_for_a_landing,
    keep_for_make_test,
    keep_one_quick_case,
    keep_part_of_the_rest,
    keep_what_uses_gpus,
    thin_out,
)


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
            path=ROOT / "tests" / "test_some.py",
            name=name,
            originalname=name,
            fixturenames=fixtures,
            own_markers=[getattr(pytest.mark, mark).mark if isinstance(mark, str) else mark.mark for mark in marks],
            callspec=SimpleNamespace(params=params) if params else None,
        )


def kept(*items):
    return [item.callspec and item.callspec.params for item in thin_out(list(items))]


def quick(*items):
    keep_one_quick_case(items)
    return [item.callspec and item.callspec.params for item in items if item.get_closest_marker("quick")]


def test_two_cases_of_a_test_and_each_value_of_a_table():
    """A value would be tested by neither of two cases, though it could be, or cases that cost nothing be left out."""
    values = {"stage": [1, 2], "backend": ["eager", "inductor"], "model": "abc"}
    first, second = kept(*varied("test_a", **values))
    assert all(first[name] != second[name] for name in first)
    table = kept(*varied("test_a", marks=["table"], **values))
    assert all({row[name] for row in table} == {*of_name} for name, of_name in values.items())
    # Without ranks or without values it is run as it is.
    assert len(kept(*varied("test_a", fixtures=(), **values))) == 12 and kept(*varied("test_b")) == [None]


def test_values_take_turns_from_test_to_test():
    """All tests would take the same stage."""
    tests = [varied(f"test_{number}", stage=[1, 2, 3]) for number in range(6)]
    pairs = [frozenset(row["stage"] for row in kept(*test)) for test in tests]
    assert set(pairs) == set(map(frozenset, itertools.combinations([1, 2, 3], 2)))


@pytest.mark.parametrize("marks", [(), ("table",)], ids=["two cases", "table"])
def test_no_test_changes_what_another_covers(marks):
    """A new test, or another order of collecting, would change which cases of an old test run."""
    others = [varied(name, stage=[1, 2], backend=["eager", "inductor"], model="abc") for name in "bcdefg"]
    test = list(varied("test_a", marks=marks, stage=[1, 2], backend=["eager", "inductor"], model="abc"))
    among_others = thin_out([*itertools.chain(*others), *reversed(test)])
    assert {item.nodeid for item in among_others if item.name == "test_a"} == {item.nodeid for item in thin_out(test)}


def test_one_quick_case_of_each_test_generates_no_code():
    """make quick would run all cases of a test, wait for the code generator, or leave out cases that cost nothing."""
    tests = [varied(name, marks=["sanitized", "quick"], backend=["inductor", "eager"], stage=[1, 2]) for name in "ab"]
    items = list(itertools.chain(*tests, varied("c", stage=[1, 2])))
    assert quick(*items) == 2 * [{"backend": "eager", "stage": 1}]
    assert sum(item.get_closest_marker("sanitized") is not None for item in items) == 8
    assert len(quick(*varied("test_a", fixtures=(), marks=["quick"], backend=["inductor", "eager"]))) == 2
    assert quick(*varied("test_b", marks=["quick"])) == [None]


def test_files_that_use_no_gpu_are_left_out_and_are_there():
    """A renamed file would run on machines with GPUs, where it shows nothing."""
    files = ["test_some.py", *WITHOUT_A_GPU, "test_other.py"]
    kept_files = [item.path.name for item in keep_what_uses_gpus([Item(path=TESTS / name) for name in files])]
    assert kept_files == ["test_some.py", "test_other.py"]
    assert [name for name in WITHOUT_A_GPU if not [*TESTS.rglob(name)]] == []


PROGRAM = pytest.mark.program("setup.py", "examples")


@pytest.mark.parametrize(
    "changed, runs",
    [
        ((), False),
        (("setup.py",), True),
        (("examples/demo/train.py",), True),
        (("tests/test_some.py",), True),
        # Not by the beginning of a name.
        (("setup.pyi", "examples_of_others/a.py", "tests/test_some.py.orig"), False),
    ],
)
def test_programs_run_where_they_have_changed(changed, runs):
    """A program would not run though its subject has changed, or run in every make test."""
    # A slow program is one all the same.
    for marks in ([PROGRAM], ["slow", PROGRAM]):
        assert len(keep_for_make_test(list(varied("a", marks=marks)), changed)) == runs


def test_the_parts_of_the_rest_cost_alike():
    """One part would get most of a test's slow cases, and the landing whose turn it is would wait twice as long."""
    slow = list(varied("a", marks=["slow"], size=range(34)))
    thinned = list(varied("b", size=range(25)))
    items = [*slow, *thinned]
    for part in range(PARTS):
        kept = {item.nodeid for item in keep_part_of_the_rest(items, part)}
        assert sum(item.nodeid in kept for item in slow) in (3, 4)
        assert sum(item.nodeid in kept for item in thinned) in (2, 3)
        # Another test changes nothing.
        assert kept >= {item.nodeid for item in keep_part_of_the_rest(slow, part)}


def landings(items, numbers, changed=()):
    """Which items each of these landings runs, and none of them twice."""
    runs = [[item.nodeid for item in keep_for_a_landing(items, number, changed)] for number in numbers]
    assert all(len(set(names)) == len(names) for names in runs)
    return runs


@pytest.mark.parametrize("first", [3, PARTS - 1], ids=str)
def test_landings_run_everything(first):
    """A fault would be found by a test that no landing runs, or long after the change that has made it."""
    test = list(varied("a", stage=[1, 2], backend=["eager", "inductor"], model="abc"))
    programs = list(varied("b", marks=[PROGRAM], fixtures=(), size=range(30)))
    items = [*test, *programs, *varied("c", marks=["slow"], size=range(30))]
    everything = {item.nodeid for item in items}
    always = {item.nodeid for item in keep_for_make_test(items, ())}
    assert not [name for name in always if name.startswith("c")]
    # No item is in two parts of the rest.
    parts = [[item.nodeid for item in keep_part_of_the_rest(items, part)] for part in range(PARTS)]
    assert sorted(itertools.chain(always, *parts)) == sorted(everything) and all(parts)
    runs = landings(items, range(first, first + PARTS))
    assert set(itertools.chain(*runs)) == everything
    for names in runs:
        assert always < set(names) and len(names) < len(always) + len(everything) / PARTS + len(programs) / SHARES + 3
    # A program whose own file has changed runs at once, any other one in one of the next landings.
    of_programs = {item.nodeid for item in programs}
    assert set(*landings(items, [first], {"tests/test_some.py"})) > of_programs
    shares = landings(items, range(first, first + SHARES))
    assert set(itertools.chain(*shares)) >= of_programs
    assert all(len(of_programs.intersection(names)) < 15 for names in shares)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Returns ``git(...)``, which runs git in an empty folder and returns what it prints."""
    for name, value in (("name", "test"), ("email", "test@example.com")):
        for role in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{role}_{name.upper()}", value)

    def git(*arguments):
        command = ["git", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--initial-branch=main")
    return git


def test_the_history_says_what_a_landing_runs(tmp_path, monkeypatch, repository):
    """CI would run no program that has changed, or always the same part, and nobody would see it."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, does in (("chromedriver", ""), ("make", "echo $*")):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / ".ci").mkdir()
    shutil.copy2(ROOT / ".ci" / "run", tmp_path / ".ci")
    repository("add", ".ci")

    def commit(times):
        for number in range(times):
            repository("commit", "--allow-empty", f"--message={number}")

    def landed(folder=tmp_path, status=0):
        ran = subprocess.run(["bash", ".ci/run"], cwd=folder, capture_output=True, text=True)
        assert ran.returncode == status, ran.stderr
        return (ran.stdout + ran.stderr).strip()

    def commits_back(number):
        return repository("rev-parse", f"HEAD~{number}")

    commit(5)
    # All there is.
    assert landed() == f"test-landing PART=5 CHANGED_SINCE={commits_back(4)}"
    commit(100)
    assert landed() == f"test-landing PART=105 CHANGED_SINCE={commits_back(80)}"
    # However many commits a branch has, its merge is one.
    repository("checkout", "-b", "work", "HEAD~3")
    commit(4)
    repository("checkout", "main")
    repository("merge", "--no-ff", "work")
    assert landed() == f"test-landing PART=106 CHANGED_SINCE={commits_back(80)}"
    repository("clone", "--depth=50", f"file://{tmp_path}", "shallow")
    assert landed(tmp_path / "shallow", status=1).endswith("chooses tests; run git fetch --unshallow first.")
    repository("-C", "shallow", "fetch", "--unshallow")
    assert landed(tmp_path / "shallow") == landed()


def test_changed_files(tmp_path, tmp_path_factory, monkeypatch, repository):
    """A change that is not committed yet, or that an earlier commit of the branch made, would start no program."""

    def write(*names):
        for name in names:
            (tmp_path / name).write_text(f"{(tmp_path / name).exists()}")

    monkeypatch.setattr(selection, "ROOT", tmp_path_factory.mktemp("no_repository"))
    assert changed_files(None) == set()
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    write("same", "later", "edited", "in the branch", ".gitignore")
    (tmp_path / ".gitignore").write_text("ignored")
    repository("add", ".")
    repository("commit", "--message=first")
    assert changed_files(None) == set()
    repository("checkout", "-b", "work", "--track", "main")
    write("in the branch")
    repository("commit", "--all", "--message=second")
    write("edited", "new", "ignored")
    assert changed_files(None) == {"in the branch", "edited", "new"}
    assert changed_files("HEAD") == {"edited", "new"}


@pytest.mark.parametrize(
    "marks, limit",
    [((), 3.0), (("quick",), 0.3), (("slow",), None), ((PROGRAM,), None), (("launcher",), None), (("table",), 3.0)],
    ids=str,
)
def test_limits(marks, limit, monkeypatch):
    """A test would take longer than make test has time for, and nobody would be told where to move it."""
    assert 1 <= cpu_budget.slowness() < 100
    (item,) = varied("a", marks=marks)
    monkeypatch.setattr(cpu_budget, "slowness", lambda: 1.0)
    cpu_budget.check(item, cpu_budget.TOLERATED * (limit or 1000) - 0.01)
    if limit is not None:
        with pytest.raises(cpu_budget.OverBudget, match=f"make test allows {limit:g}: .*mark"):
            cpu_budget.check(item, cpu_budget.TOLERATED * limit + 0.01)
        # A machine that others use takes more CPU-seconds for the same work.
        monkeypatch.setattr(cpu_budget, "slowness", lambda: 3.0)
        cpu_budget.check(item, 3 * cpu_budget.TOLERATED * limit - 0.01)


def test_two_tests_start_programs_without_a_limit():
    """More and more tests would take the mark that has no limit."""
    assert sum("@pytest.mark.launcher" in path.read_text().split("\n") for path in TESTS.rglob("test_*.py")) == 2


def marks_of(nodes):
    """The text of marks: of decorators, or of what a file gives to ``pytestmark``."""
    return "".join(map(ast.unparse, nodes)).lower()


def test_every_test_says_which_fault_it_finds():
    """A test would be kept for ever because nobody knows what it is for."""
    silent = []
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        of_file = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.dump(node)]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node):
                marks = marks_of([*of_file, *node.decorator_list])
                if "program" not in marks and "mark.slow" not in marks:
                    silent.append(f"{path.name}: {node.name}")
    assert silent == [], "a docstring names the fault that only this test finds"
