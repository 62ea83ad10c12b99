# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that fails a test of ``make test`` that takes too many CPU-seconds.

CPU-seconds are those of the worker, of the ranks in the test's functions and of programs that these have waited for.
Wall time would depend on what else the machine does, and ranks that start would count for whichever test came first.
pytest-durations 1.10 prints wall time, and has no limit: 21 and 6 seconds on a machine that others use for two cases
that take 4 and 2 CPU-seconds.
"""

import argparse
import ast
import inspect
import time

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


class Limits:
    """The plugin, in the process that runs tests."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = _spent()
        result = yield
        check(item, _spent() - before)
        return result


def _spent():
    return pool.cpu_seconds() + pool.SPENT["calls"]
