# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``@on_ranks(2)``: the body of a test runs on each rank, and asserts there."""

import functools
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist


def on_ranks(world, timeout=600, stop=False, **of_pool):
    """Returns a decorator of a test, the lowest of its marks.

    Arguments and fixtures reach the body pickled. Either all ranks skip the test or none.

    Args:
        world: the number of ranks, or the name of the argument that has it.
        timeout: seconds in which ranks must end.
        stop: whether the processes end, because the body changes what lasts as long as they do.
        of_pool: arguments of the fixture ``ranks``.
    """

    def decorate(body):
        @functools.wraps(body)
        def in_rank(arguments):
            try:
                body(**arguments)
            except pytest.skip.Exception as skipped:
                return skipped.msg or "skipped"

        @functools.wraps(body)
        def test(*, ranks, **arguments):
            pool = ranks(arguments[world] if isinstance(world, str) else world, **of_pool)
            try:
                skipped = pool.run(in_rank, arguments, timeout=timeout)
            finally:
                if stop:
                    pool.stop()
            if any(skipped):
                assert all(skipped), f"some ranks alone skipped the test: {skipped}"
                pytest.skip(skipped[0])

        signature = inspect.signature(body)
        fixture = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), fixture])
        # A rank looks the test up by its name, and calls this.
        test.in_rank = in_rank
        return test

    return decorate


def explain_assertions():
    """Makes modules of tests that this process imports from now on say both sides of an assertion that fails.

    pytest has installed what does this in its own process alone, and has no public way for others.
    """
    from _pytest.assertion.rewrite import AssertionRewritingHook, assertstate_key

    # All that the hook asks of a configuration. A real one would read files, and load plugins and conftest.py.
    settings = {"python_files": ["test_*.py"], "enable_assertion_pass_hook": False}
    state = SimpleNamespace(trace=lambda *_: None)
    config = SimpleNamespace(getini=settings.get, stash={assertstate_key: state})
    sys.meta_path.insert(0, AssertionRewritingHook(config))


def gathered(value):
    """Returns what each rank has, in rank order. All ranks call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
