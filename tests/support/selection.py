# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which tests ``make quick`` runs, and which of ``test_parity.py`` run under sanitizers."""

from pathlib import Path

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
    "test_end_backward_stands_behind_every_reduction",
    "test_reductions_follow_their_slots",
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


def _with_inductor(item):
    return "inductor" in repr(getattr(item, "callspec", None) and item.callspec.params)
