# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``compile.deepcompile`` alone makes an engine train under DeepCompile; nobody has to call ``engine.compile()``."""

import pytest

from support import by_configuration
from support.training import Case

ITSELF = "DeepCompile compiles the engine with backend 'eager'"
BECAUSE = "compile.deepcompile is true"
TOO_LATE = "The arguments of engine.compile() have no effect"


def trained(ranks, case, *how, **kwargs):
    """Returns (compiled, from_graphs, texts, warnings) of each rank, whose parameters are those of a plain loop."""
    results = []
    for error, *found in ranks(2).run(by_configuration.trains, case, *how, **kwargs):
        compiled, from_graphs, texts, warnings = found
        assert error < 1e-5
        assert not [text for text in texts if "engine.compile() has not been called" in text]
        results.append((compiled, from_graphs, texts, warnings))
    return results


def said(texts, beginning):
    return [text for text in texts if beginning in text]


@pytest.mark.parametrize("stage, accumulation", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_before_the_first_training_forward(ranks, stage, accumulation):
    case = Case(stage=stage, accumulation=accumulation)
    results = trained(ranks, case, "rank_0_evaluates")
    for rank, (compiled, from_graphs, texts, warnings) in enumerate(results):
        assert all(compiled) and all(from_graphs)
        # One line, on one rank, and no warning.
        (line, *rest) = said(texts, ITSELF) if rank == 0 else [None]
        assert not rest and (rank != 0 or line.endswith("before its first training forward, because " + BECAUSE))
        assert not said(warnings, "DeepCompile compiles")


def test_a_module_trained_in_evaluation_mode(ranks):
    for rank, (compiled, from_graphs, texts, _) in enumerate(trained(ranks, Case(), "in_evaluation_mode")):
        assert compiled == [False, True, True] and from_graphs[0] == 0 and all(from_graphs[1:])
        assert rank != 0 or len(said(texts, "behind its first step, because " + BECAUSE)) == 1


def test_a_module_that_is_called_without_its_engine(ranks):
    for compiled, _, _, _ in trained(ranks, Case(accumulation=2), during="of_the_module"):
        assert compiled == [False, False, True, True, True, True]


def test_an_engine_that_holds_gradients_waits_for_the_step(ranks):
    case = Case(accumulation=2)
    for compiled, from_graphs, _, _ in trained(ranks, case, "with_gradients_already"):
        assert compiled == [False, False, True, True, True, True, True, True] and all(from_graphs[2:])


def test_the_callers_compile_wins(ranks):
    for compiled, from_graphs, texts, warnings in trained(ranks, Case(), "compiled_by_caller"):
        assert all(compiled) and all(from_graphs)
        assert not said(texts, ITSELF) and not said(warnings, TOO_LATE)


def test_a_compile_that_comes_too_late_is_told(ranks):
    for rank, (_, _, _, warnings) in enumerate(trained(ranks, Case(), "compiled_too_late")):
        assert len(said(warnings, TOO_LATE)) == (1 if rank == 0 else 0)


def test_refused_as_by_compile(ranks):
    case = Case(config={"compile": {"regional_compilation": ["Unheard"]}})
    for raised, (compiled, optimizer), evaluated in ranks(2).run(by_configuration.refused, case):
        sentence = "DeepCompile with ZeRO stage 1: compile.regional_compilation names ['Unheard'], but OneGraph"
        assert len(raised) == 4 and len(set(raised)) == 1 and raised[0].startswith(sentence)
        assert not compiled and optimizer == "DeepSpeedZeroOptimizer" and evaluated > 0


def test_an_engine_without_an_optimizer_is_left_alone(ranks):
    for texts, compiled in ranks(2).run(by_configuration.told_in_a_forward, 0):
        assert not texts and not compiled


def test_zero3_is_told_as_by_the_base(ranks):
    for rank, (texts, compiled) in enumerate(ranks(2).run(by_configuration.told_in_a_forward, 3)):
        assert not compiled
        assert rank != 0 or said(texts, "engine.compile() has not been called")


def test_a_destroyed_engine_is_not_held(ranks):
    assert all(ranks(2).run(by_configuration.gone_when_destroyed, Case()))


def test_a_function_that_its_caller_compiles(ranks):
    for error, from_graphs in ranks(2).run(by_configuration.traced_by_the_caller, Case()):
        assert error < 1e-5 and from_graphs > 0


def test_an_engine_whose_parameters_a_later_one_has_is_left_alone(ranks):
    for compiled, error in ranks(2).run(by_configuration.of_parameters_that_were_taken, Case()):
        assert compiled == (False, True) and error < 1e-5


# The cache of keys and values of transformers ------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_steps(ranks):
    pytest.importorskip("transformers")
    step = by_configuration.first_step
    results = {use_cache: ranks(2).run(step, use_cache) for use_cache in (True, None, False)}
    return {**results, "asked for": ranks(2).run(step, None, asked={"use_cache": True})}


def test_training_forwards_keep_no_cache(first_steps):
    for with_cache, default, without, asked_for in zip(*first_steps.values(), strict=True):
        for each in (with_cache, default):
            assert each["graphs"] <= without["graphs"] and each["loss"] == without["loss"]
            assert not each["cache in training"] and each["cache in evaluation"] and each["use_cache"] is True
            assert each["generated"] == without["generated"]
        assert without["use_cache"] is False and not without["cache in evaluation"]
        # The test could not fail if the cache cost no graphs.
        assert asked_for["cache in training"] and asked_for["graphs"] > without["graphs"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_cache_that_a_model_reads_stays(ranks, checkpointed):
    pytest.importorskip("transformers")
    for off, on in ranks(2).run(by_configuration.with_memory, checkpointed):
        assert on == pytest.approx(off, rel=1e-5) and off[-1] < off[0]
