# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support import cpu_budget, processor, sanitizer, selection  # noqa: E402, F401
from support.benchmarks import BENCHMARKS, benchmarks  # noqa: E402
from support.pool import Ranks  # noqa: E402

REPORTS = pytest.StashKey[Path]()

# Inductor caches a graph for any length with kernels for the length at hand, which is short in tests. Training on the
# same machine would find these and be slow.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(BENCHMARKS.parent / "build" / "inductor"))
# Kernels for one number at a time compile in two thirds of the time of those for vectors, and tests compile hundreds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Of this process, of ranks and of programs that tests start. With a thread for each core in each of these, threads
# wait for each other in loops, which doubles the time of the examples.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def ranks(pytestconfig):
    """Returns ``ranks(world, patience, **variables)``: as many processes, with such variables in their environment.

    ``patience`` as in ``Ranks``. On a CPU, one rank and two ranks without such variables are started once a test run.
    Of all others the processes of one pool stay, until another is asked for.
    """
    pools = {}
    sanitized = pytestconfig.option.sanitizer
    environment = sanitizer.environment(sanitized, pytestconfig.stash[REPORTS]) if sanitized else {}

    def of(world, patience=1800, **variables):
        import torch

        key = (world, patience, *sorted(variables.items()))
        if key not in pools or not pools[key].started:
            # Processes that wait need memory alone, but a GPU has less of it than a host.
            staying = set() if sanitized or torch.cuda.is_available() else {(1, 1800), (2, 1800)}
            for other, pool in pools.items():
                if other not in staying:
                    pool.stop()
        if key not in pools:
            pools[key] = Ranks(world, {**environment, **variables}, patience)
            if sanitized:
                pools[key].run(sanitizer.compile_native_code, sanitized, timeout=1800)
        return pools[key]

    yield of
    for pool in pools.values():
        if sanitized == "address" and pool.started:
            pool.run(sanitizer.look_for_leaks)
        pool.stop()


@pytest.fixture(scope="module")
def package():
    """Imports the package of benchmarks, and returns ``package(name)``, which imports a module of it."""
    with benchmarks() as module:
        yield module


def pytest_addoption(parser):
    parser.addoption(
        "--fewer-cases",
        action="store_true",
        help="run two cases of each test in rank processes, and more only of tables; without --gpu, leave out slow "
        "tests and programs that have not changed",
    )
    parser.addoption(
        "--cpu-limits",
        action="store_true",
        help="fail a test that takes far more CPU-seconds than its mark allows",
    )
    parser.addoption("--changed-since", help="the commit since which programs have changed that make test runs")
    parser.addoption(
        "--part-of-the-rest",
        type=int,
        help=f"of {selection.PARTS} parts of what --fewer-cases leaves out, run this one; with --fewer-cases, both",
    )
    parser.addoption(
        "--gpu", action="store_true", help="leave out the files that use no GPU; end at once where torch finds none"
    )
    parser.addoption("--every-model", action="store_true", help="train all models of test_models.py, not a dozen")
    parser.addoption(
        "--every-optimizer", action="store_true", help="in test_optimizers.py, train in both stages and measure"
    )
    parser.addoption("--base", help="the folder that holds the released DeepSpeed on which this fork is based")
    parser.addoption("--models", type=int, help="how many random models test_fuzz.py tries; a few by default")
    parser.addoption("--world", type=int, default=2, help="on how many ranks")
    parser.addoption("--steps", type=int, default=200, help="how long the long run of test_engines.py is")
    parser.addoption("--seed", type=int, default=0, help="of the random models")
    parser.addoption(
        "--sanitizer",
        choices=list(sanitizer.OPTIONS),
        help="of the native code; see make sanitize",
    )
    parser.addoption(
        "--reports", type=Path, default=Path("build/sanitizers"), help="the folder for what it reports; emptied first"
    )


def pytest_configure(config):
    option = config.option
    if option.cpu_limits and _has_warm_ranks():
        config.pluginmanager.register(cpu_budget.Limits())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.option.gpu and not config.option.collectonly:
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu needs a GPU, and torch finds none; without --gpu tests run on CPU")
    if config.option.sanitizer:
        reports = config.stash[REPORTS] = config.option.reports.resolve()
        shutil.rmtree(reports, ignore_errors=True)
        reports.mkdir(parents=True)


def _has_warm_ranks():
    """Whether ranks fork from a process that has compiled, and find graphs in a cache: limits are for such ranks."""
    import torch

    from support import graph_cache

    return graph_cache.SUPPORTED and not torch.backends.cuda.is_built()


def pytest_itemcollected(item):
    """Makes ``-k compile.shard_parameters`` find the tests whose mark ``options`` has that name."""
    for mark in item.iter_markers("options"):
        item.extra_keyword_matches.update(mark.args)


# Before pytest deselects by marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    selection.keep_one_quick_case(items)
    option, kept = config.option, items
    if option.gpu:
        kept = selection.keep_what_uses_gpus(items)
        # A machine with GPUs has the cores for slow tests.
        kept = selection.thin_out(kept) if option.fewer_cases else kept
    elif option.fewer_cases and option.part_of_the_rest is not None:
        changed = selection.changed_files(option.changed_since)
        kept = selection.keep_for_a_landing(items, option.part_of_the_rest, changed)
        # Limits are for the cases of make test.
        for item in selection.keep_part_of_the_rest(items, option.part_of_the_rest):
            item.add_marker("slow")
    elif option.fewer_cases:
        kept = selection.keep_for_make_test(items, selection.changed_files(option.changed_since))
    elif option.part_of_the_rest is not None:
        kept = selection.keep_part_of_the_rest(items, option.part_of_the_rest)
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=list(set(items).difference(kept)))
        items[:] = kept
    # They wait for time limits more than they compute, so no other test should be left to wait for them at the end.
    items.sort(key=lambda item: item.path.name != "test_two_hosts.py")


def pytest_sessionfinish(session):
    # A report fails the run, also where the test that caused it passed.
    if session.config.option.sanitizer and sanitizer.found(session.config.stash[REPORTS]) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if config.option.sanitizer:
        passed = len(terminalreporter.stats.get("passed", []))
        for line in sanitizer.summary(config.option.sanitizer, passed, sanitizer.found(config.stash[REPORTS])):
            terminalreporter.write_line(line)
    if config.option.every_model or config.option.every_optimizer:
        from support import tables

        if config.option.every_model:
            tables.print_models(terminalreporter)
        if config.option.every_optimizer:
            tables.print_optimizers(terminalreporter)
