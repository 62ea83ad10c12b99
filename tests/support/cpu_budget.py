# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that records the CPU-seconds of each test, and fails a test of ``make test`` that takes too many.

CPU-seconds are those of the worker, of the ranks in the test's functions and of programs that these have waited for.
Wall time would depend on what else the machine does, and ranks that start would count for whichever test came first.
pytest-durations 1.10 prints wall time, and has no limit: 21 and 6 seconds on a machine that others use for two cases
that take 4 and 2 CPU-seconds.
"""

import argparse
import ast
import collections
import contextlib
import inspect
import time
from pathlib import Path

import pytest

from support import pool

# The limit of a test in CPU-seconds, by its mark. Programs have none, and the two tests marked launcher.
QUICK, LIMIT = 0.3, 3.0
# How many times its limit a test may take before it fails. Limits are for a test that runs alone. In `make test`, its
# processes share cores and caches with others and take up to 1.6 times the CPU-seconds.
TOLERATED = 2
# What a piece of work takes alone on the machine for which limits are, in CPU-seconds. Machines differ, and so does
# what else they do.
ALONE = 0.072
# One row for each test: CPU-seconds of its setup, its call, its teardown and of ranks that it started; its name.
TABLE = Path(__file__).resolve().parent.parent.parent / "build" / "cpu_seconds.tsv"
PARTS = ("setup", "call", "teardown", "starts")


class OverBudget(AssertionError):
    """A test took more CPU-seconds than its mark allows. The Makefile has pytest-rerunfailures repeat these alone."""


def limit_of(item):
    """Returns the CPU-seconds that a test may take, or None if any number."""
    if any(item.get_closest_marker(mark) for mark in ("launcher", "program", "slow")):
        return None
    return QUICK if item.get_closest_marker("quick") else LIMIT


def check(item, seconds):
    """Raises :class:`OverBudget` if a test that took ``seconds`` is far over its limit."""
    limit = limit_of(item)
    if limit is None or seconds <= TOLERATED * limit or seconds <= TOLERATED * limit * slowness():
        return
    if limit == QUICK:
        remedy = "take the mark 'quick' from it, and mark another test of the subject"
    else:
        remedy = "give it fewer ranks, blocks or steps, or mark it 'slow', and leave a test of the subject that is not"
    raise OverBudget(f"the test took {seconds:.2f} CPU-seconds, and make test allows {limit:g}: {remedy}")


def slowness():
    """Returns how many times as long as where ``ALONE`` was measured this machine takes at this time, at least 1."""
    source, begin = inspect.getsource(argparse), time.process_time()
    # Dynamo, which most tests spend their time in, works as a parser does: small objects all over memory.
    for _ in range(3):
        ast.parse(source)
    return max(1.0, (time.process_time() - begin) / ALONE)


class Recorder:
    """Records in the process that runs tests.

    Args:
        enforces: whether a test over its limit fails.
    """

    def __init__(self, enforces):
        self._enforces = enforces

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        # Of a test that runs a second time, the first run does not count.
        item.user_properties[:] = [entry for entry in item.user_properties if entry[0] not in (*PARTS, "limit")]
        with self._recorded(item, "setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = _spent()
        with self._recorded(item, "call"):
            result = yield
        if self._enforces:
            check(item, _spent() - before)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item):
        with self._recorded(item, "teardown"):
            return (yield)

    @contextlib.contextmanager
    def _recorded(self, item, part):
        before, starts = _spent(), pool.SPENT["starts"]
        try:
            yield
        finally:
            # pytest-xdist brings these to the process that prints.
            item.user_properties.append((part, _spent() - before))
            item.user_properties.append(("limit", limit_of(item) or 0.0))
            item.user_properties.append(("starts", pool.SPENT["starts"] - starts))


def _spent():
    return pool.cpu_seconds() + pool.SPENT["calls"]


class Printer:
    """In the process that prints, writes ``TABLE`` and prints the sum, and which tests are over their limits."""

    def __init__(self):
        self._rows = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            row = self._rows[report.nodeid] = collections.Counter()
            for name, value in report.user_properties:
                if name in PARTS:
                    row[name] += value
                elif name == "limit":
                    row[name] = value

    def pytest_terminal_summary(self, terminalreporter):
        if not self._rows:
            return
        TABLE.parent.mkdir(exist_ok=True)
        with TABLE.open("w") as file:
            for name, row in sorted(self._rows.items()):
                print(*(f"{row[part]:.3f}" for part in PARTS), name, sep="\t", file=file)
        total = {part: sum(row[part] for row in self._rows.values()) / 60 for part in PARTS}
        parts = ", ".join(f"{part} {minutes:.1f}" for part, minutes in total.items())
        terminalreporter.write_line(f"CPU-minutes of tests: {sum(total.values()):.1f} ({parts})")
        for name, row in self._rows.items():
            if 0 < row["limit"] < row["call"]:
                terminalreporter.write_line(f"over its limit of {row['limit']:g}: {row['call']:.2f} {name}")
