# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which tests run where not all of them do: in ``make test``, ``make quick``, ``make test-gpu`` and ``.ci/run``.

Marks at the tests say which: ``program``, ``quick``, ``slow`` and ``table``, which ``pyproject.toml`` explains.

Plugins of pytest do not fit. pytest-testmon 2.2 records what runs in pytest's own process, but ranks run the package:
after a change of ``engine/set_up.py`` that fails all tests of ``test_buckets.py``, it ran none of them. pytest-split
0.11 forms groups of everything that is collected. A new test moves other tests to other groups, two fifths of those
of ``tests/core`` by ``least_duration``, so ten landings in a row would not run everything.
"""

import hashlib
import subprocess
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Set, Tuple

import pytest

# Files whose tests use no GPU, wherever they run -> what they do instead. On a GPU machine they would show nothing
# that `make test` does not show elsewhere, and some need programs or a network that such a machine may lack. Other
# tests without a GPU, for example of the installed torch, take seconds together.
WITHOUT_A_GPU = {
    "test_benchmarks.py": "starts its programs with DS_ACCELERATOR=cpu",
    "test_demo.py": "trains in processes that see no GPU",
    "test_documentation.py": "reads the pages, and runs commands up to where they would begin to train",
    "test_packaging.py": "builds packages and installs them",
    "test_rooms.py": "builds the package without a part of it, and trains on CPU",
    "test_scale_model.py": "computes a model, and measures gloo",
    "test_site.py": "builds the pages and opens them in a browser",
    "test_two_hosts.py": "trains on two hosts that see no GPU",
}


ROOT = Path(__file__).resolve().parent.parent.parent
# In so many parts the tests are run that `make test` leaves out: `.ci/run` runs one of them.
PARTS = 10
# `.ci/run` runs one of so many parts of all programs.
SHARES = 3


def changed_files(since: Optional[str]) -> Set[str]:
    """Returns the names of files that differ from those of a commit, or are new; without git none.

    Args:
        since: the commit; None: the newest that this branch shares with its upstream, or HEAD if it has none.
    """

    def git(*arguments):
        try:
            return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
        except OSError:
            return [""]

    if since is None:
        since = git("merge-base", "HEAD", "@{upstream}")[0] or "HEAD"
    elif not git("rev-parse", "--verify", "--quiet", f"{since}^{{commit}}")[0]:
        raise pytest.UsageError(f"--changed-since {since} is no commit")
    return {*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")} - {""}


def keep_for_make_test(items: List[pytest.Item], changed: Iterable[str]) -> List[pytest.Item]:
    """Lists the items that ``make test`` runs: no slow tests, programs where they changed, and few of many cases.

    Args:
        changed: the names of files that differ from what was tested before.
    """
    return thin_out([item for item in items if (_touched(item, changed) if _is_program(item) else not _is_slow(item))])


def keep_part_of_the_rest(items: List[pytest.Item], part: int) -> List[pytest.Item]:
    """Lists the items of one of ``PARTS`` parts of what ``make test`` leaves out if nothing has changed."""
    always = {item.nodeid for item in keep_for_make_test(items, ())}
    return _dealt([item for item in items if item.nodeid not in always], part, PARTS)


def keep_for_a_landing(items: List[pytest.Item], part: int, changed: Iterable[str]) -> List[pytest.Item]:
    """Lists the items that ``.ci/run`` runs: those of ``make test``, some programs, a part of the rest.

    A change of the core is a change of nearly every program's subject, and all programs take long together. So a
    program whose own file has changed runs, and of the others a part.

    Args:
        part: which one, any number from 0.
        changed: the names of files that differ from what earlier landings have tested, or more.
    """
    programs = [item for item in items if _is_program(item)]
    kept = {item.nodeid for item in keep_for_make_test(items, ())}
    kept.update(item.nodeid for item in keep_part_of_the_rest(items, part))
    kept.update(item.nodeid for item in programs if _own_file(item) in changed)
    kept.update(item.nodeid for item in _dealt(programs, part, SHARES))
    return [item for item in items if item.nodeid in kept]


def _dealt(items: List[pytest.Item], part: int, parts: int) -> List[pytest.Item]:
    """Lists the items of one of so many parts, which take about as long as each other.

    Cases of one test cost about the same, so each test deals its cases to the parts in turn, slow ones by themselves.
    The test's name says which part gets the first case, so that no test changes which part gets what of another.
    """
    tests: Dict[Tuple[str, str, bool], List[pytest.Item]] = {}
    for item in items:
        tests.setdefault((*_test(item), _is_slow(item)), []).append(item)
    chosen: Set[str] = set()
    for test, cases in tests.items():
        first = int.from_bytes(hashlib.sha256(repr(test).encode()).digest(), "big")
        cases.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        chosen.update(case.nodeid for number, case in enumerate(cases, first) if (number - part) % parts == 0)
    return [item for item in items if item.nodeid in chosen]


def _is_program(item) -> bool:
    return item.get_closest_marker("program") is not None


def _is_slow(item) -> bool:
    return item.get_closest_marker("slow") is not None


def _own_file(item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def _touched(item, changed: Iterable[str]) -> bool:
    """Whether one of these files is a program's own, or among what its mark names."""
    paths = (_own_file(item), *item.get_closest_marker("program").args)
    return any(name == path or name.startswith(f"{path}/") for name in changed for path in paths)


def keep_what_uses_gpus(items: List[pytest.Item]) -> List[pytest.Item]:
    """Lists the items that ``--gpu`` runs, as in ``make test-gpu``: all but those of ``WITHOUT_A_GPU``."""
    return [item for item in items if item.path.name not in WITHOUT_A_GPU]


def keep_one_quick_case(items: List[pytest.Item]) -> None:
    """Takes the mark ``quick`` from all cases but one of each test in rank processes, so that ``make quick`` is quick.

    That one is the first case that generates no code, which takes long.
    """
    kept: Set[Tuple[str, str]] = set()
    for item in items:
        if item.get_closest_marker("quick") and _runs_in_ranks(item):
            if _test(item) in kept or _generates_code(item):
                item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "quick"]
            else:
                kept.add(_test(item))


def thin_out(items: List[pytest.Item]) -> List[pytest.Item]:
    """Lists two cases at most of each test in rank processes that is no table, and all items of other tests.

    Most tests vary the stage, the accumulation, the model and the compiler. Nearly all of a case's time goes into
    tracing graphs, so the product of all values takes hours on two cores. The first case is the one whose name has the
    lowest hash, so that stages and the like take turns from test to test, and no test changes what another covers. The
    second differs from the first in as many values as it can. Of a table, cases are taken until each value occurs.
    """
    tests: Dict[Tuple[str, str], List[pytest.Item]] = {}
    for item in items:
        tests.setdefault(_test(item), []).append(item)
    chosen: Set[str] = set()
    for cases in tests.values():
        missing = set().union(*map(_values, cases))
        if not _runs_in_ranks(cases[0]) or not missing:
            chosen.update(item.nodeid for item in cases)
            continue
        left = sorted(cases, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        is_table = cases[0].get_closest_marker("table")
        while missing and left and (is_table or len(cases) - len(left) < 2):
            best = max(left, key=lambda item: len(_values(item) & missing))
            left.remove(best)
            chosen.add(best.nodeid)
            missing -= _values(best)
    return [item for item in items if item.nodeid in chosen]


def _test(item) -> Tuple[str, str]:
    """The file and the name of the test of which an item is a case."""
    return item.path.name, getattr(item, "originalname", item.name)


def _runs_in_ranks(item) -> bool:
    return "ranks" in item.fixturenames


def _values(item) -> Set[Tuple[str, str]]:
    """The arguments of a case and their values; empty for a test that varies nothing."""
    callspec = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()


def _generates_code(item) -> bool:
    return any("inductor" in value for _, value in _values(item))
