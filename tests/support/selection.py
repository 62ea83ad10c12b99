# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which cases ``make test`` runs, which tests ``make quick`` does, and which of ``test_parity.py`` sanitizers see."""

import collections
from pathlib import Path
from typing import Dict, List, Set, Tuple

import pytest

# Each subject's tests, by the name of the function. Of a test in rank processes ``make quick`` runs each file's first
# case that generates no code, which takes long; of any other test all cases. The whole takes less than two minutes on
# two cores.
QUICK = {
    # Gradients
    "test_table",
    "test_each_gradient_takes_the_way_it_should",
    "test_stages_of_a_target",
    "test_a_backward_that_raises_leaves_nothing",
    "test_uses_of_one_block_are_reduced_together",
    "test_dropped",
    "test_gradients_from_several_threads",
    # Number formats
    "test_as_close_to_fp32_as_eager_zero",
    # Graphs
    "test_end_backward_stands_after_every_reduction",
    "test_release_goes_to_the_first_graph_that_reduces",
    "test_end_backward_releases_once",
    "test_not_cut",
    "test_limit_is_reached",
    "test_a_batch_of_one_comes_first",
    "test_checkpointed",
    # Regions, parameters that are gathered under the forward, the loss's graph: each file has a test of this name
    "test_trains_as_a_plain_loop",
    "test_blocks_that_are_named",
    "test_reads_after_a_step",
    "test_changed_in_place",
    # The step
    "test_gradient",
    "test_chunks_step_as_the_whole",
    "test_an_engine_steps_in_chunks",
    # Engines, what goes wrong, checkpoints
    "test_two_engines_of_different_kinds",
    "test_destroyed_at_any_moment",
    "test_the_next_step_is_right",
    "test_rolled_back",
    "test_before_the_first_training_forward",
    # Options and what they are documented as
    "test_formats",
    "test_refused",
    "test_every_field_is_documented",
    "test_every_argument_of_compile_is_documented",
    "test_what_is_warned_of_is_documented_as_warned",
    "test_what_is_refused_is_documented_as_refused",
    # The base, torch, models of transformers, and packaging
    "test_name_exists",
    "test_trains_as_without_deepcompile",
    "test_old_torch_is_refused",
}

# Tests of which ``make test`` runs more than two cases: one of each model, trainer and refusal.
TABLES = {
    "test_table",
    "test_trains_as_without_deepcompile",
    "test_trains_with_the_line_in_the_configuration",
    "test_refused",
}


def mark(config, items):
    """Adds the marks to collected tests. Raises where ``make quick`` would pass over a name that no test has."""
    missing = QUICK - {getattr(item, "originalname", None) for item in items}
    if missing and config.option.markexpr == "quick" and all(Path(argument).is_dir() for argument in config.args):
        raise pytest.UsageError(f"support/selection.py names tests that do not exist: {', '.join(sorted(missing))}")
    seen = set()
    for item in items:
        name, file = getattr(item, "originalname", item.name), item.path.name
        in_ranks = "ranks" in item.fixturenames
        if name in QUICK and not (in_ranks and ((file, name) in seen or _with_inductor(item))):
            item.add_marker(pytest.mark.quick)
            seen.add((file, name))
        # Generated code and other layouts of the partitions take long, and call nothing else in the native code.
        if file == "test_parity.py" and name != "test_layouts" and not _with_inductor(item):
            item.add_marker(pytest.mark.sanitized)


def thin_out(items: List[pytest.Item]) -> List[pytest.Item]:
    """Lists the items that ``make test`` runs: two cases at most of each test in rank processes that is no table.

    Most tests vary the stage, the accumulation, the model and the compiler. Nearly all of a case's time goes into
    tracing graphs, so the product of all values takes hours on two cores. The first case is the one whose values were
    taken least often by the tests before, so that stages and the like take turns. The second differs from it in as
    many values as it can. Of a table, cases are taken until each value occurs.
    """
    tests: Dict[Tuple[str, str], List[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.path.name, getattr(item, "originalname", item.name)), []).append(item)
    chosen: Set[str] = set()
    often: collections.Counter = collections.Counter()
    for (_, name), cases in tests.items():
        missing = set().union(*map(_values, cases))
        if "ranks" not in cases[0].fixturenames or not missing:
            chosen.update(item.nodeid for item in cases)
            continue
        left = list(cases)
        while missing and left and (name in TABLES or len(cases) - len(left) < 2):
            best = min(
                left, key=lambda item: (-len(_values(item) & missing), sum(often[each] for each in _values(item)))
            )
            left.remove(best)
            chosen.add(best.nodeid)
            missing -= _values(best)
            often.update(_values(best))
    return [item for item in items if item.nodeid in chosen]


def _values(item) -> Set[Tuple[str, str]]:
    """The arguments of a case and their values; empty for a test that varies nothing."""
    callspec = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()


def _with_inductor(item):
    return "inductor" in repr(getattr(item, "callspec", None) and item.callspec.params)
