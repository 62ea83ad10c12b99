# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The rules by which files of the fork import each other and write state. ``docs/architecture.md`` tells why."""

import ast
import re
from pathlib import Path

import pytest

COMPILE = Path(__file__).resolve().parent.parent / "deepspeed" / "compile"
ZERO12 = COMPILE / "zero12"

# Each module may import those of the lines above its own, and what is on its own line nothing of that line.
FLOORS = """
fx passes.zero_1_and_2_compile zero12.messages zero12.native
zero12.collectives zero12.forward zero12.key_value_cache zero12.chunked_step zero12.layout zero12.offload
zero12.backward zero12.gather zero12.step
zero12.gather_hooks zero12.state
zero12.optimizer
zero12
zero12.graph.block_classes zero12.graph.compilation_limit zero12.graph.frames zero12.graph.loss zero12.graph.lowering
zero12.graph.reductions zero12.graph.choose_blocks
zero12.graph.backend zero12.graph.compile_blocks
zero12.options
zero12.engine
init_z1_and_2 engine_calls gradient_partition parameter_gather
"""

TRAINING = {"optimizer", "state", "backward", "step", "chunked_step", "gather", "gather_hooks", "layout", "offload"}
# What the base keeps of a backward and counts.
FLAGS = {"micro_steps", "_backward_active_depth", "post_backward_callback_queued"}


def name_of(path):
    parts = path.relative_to(COMPILE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules():
    """Returns name -> syntax tree of every module of the fork below ``deepspeed/compile/``."""
    return {name_of(path): ast.parse(path.read_text()) for path in COMPILE.rglob("*.py")}


def imported(name, tree, known):
    """Yields the modules of the fork that a module imports, also within functions."""
    package = name.split(".") if (COMPILE / Path(*name.split(".")) / "__init__.py").is_file() else name.split(".")[:-1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        above = package[: len(package) - node.level + 1]
        module = ".".join([*above, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            inner = f"{module}.{alias.name}".strip(".")
            yield inner if inner in known else module


def test_imports_lead_down():
    trees = modules()
    floor = {name: number for number, line in enumerate(FLOORS.strip().splitlines()) for name in line.split()}
    assert {*trees} - {*floor, "config", "zero12.graph"} == set(), "say in FLOORS where these stand"
    for name, tree in trees.items():
        for other in imported(name, tree, trees):
            if other in floor and other != name:
                assert floor[other] < floor[name], f"{name} imports {other}"


def test_graphs_and_training_do_not_know_each_other():
    trees = modules()
    for name, tree in trees.items():
        others = {*imported(name, tree, trees)}
        if name.startswith("zero12.graph"):
            assert not {f"zero12.{part}" for part in TRAINING} & others, name
        elif name.removeprefix("zero12.") in TRAINING:
            assert not [other for other in others if other.startswith("zero12.graph")], name


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_one_module_writes_the_flags_of_a_backward(flag):
    writers = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == flag and isinstance(node.ctx, ast.Store)
    }
    assert writers == {"zero12.backward"}


def test_every_phase_has_a_way_out_and_events_lead_somewhere():
    from deepspeed.compile.zero12.backward import TRANSITIONS, Event, Phase

    assert {*TRANSITIONS} == {*Event}
    for event, transitions in TRANSITIONS.items():
        assert transitions and {*transitions, *transitions.values()} <= {*Phase}, event
    # From every phase a step comes back to its beginning.
    for phase in Phase:
        assert TRANSITIONS[Event.ABANDON][phase] is Phase.EMPTY
    reached = {after for transitions in TRANSITIONS.values() for after in transitions.values()}
    assert reached == {*Phase}


def test_the_docs_draw_and_list_the_transitions():
    from deepspeed.compile.zero12.backward import TRANSITIONS, Event, Phase

    page = (COMPILE.parents[1] / "docs" / "life_of_a_gradient.md").read_text()
    drawn = re.findall(r"(\w+) --> (\w+): (\w+)", page)
    assert {event for _, _, event in drawn} == {event.name for event in Event}
    for before, after, event in drawn:
        assert TRANSITIONS[Event[event]][Phase[before]] is Phase[after], (before, event)
    listed = {}
    for event, before, after in re.findall(r"(?m)^\| `([A-Z_]+)` \| ([^|]*) \| ([^|]*) \|", page):
        phases = re.findall(r"`(\w+)`", before) or [phase.name for phase in Phase]
        for phase in phases:
            listed[Event[event], Phase[phase]] = Phase[after.strip("`") if after != "the same" else phase]
    assert listed == {(event, phase): after for event, row in TRANSITIONS.items() for phase, after in row.items()}
