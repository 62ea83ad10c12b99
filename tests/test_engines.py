# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Several engines, forwards, backwards and threads; the end of an engine at any moment; a long run."""

import itertools

import pytest
import torch

from support import engines
from support.training import Case

BOUND = 1e-5
# As close to fp32 as rounding allows: bf16 has 8 bits.
ROUNDING = {"fp32": BOUND, "bf16": 3e-2}
NOTHING = {"bound": 0, "pending": 0, "bucket": 0, "unreduced": 0, "registered": 0}


def check(results, cases):
    for errors in results:
        for (worst, total), case in zip(errors, cases, strict=True):
            assert (worst if case.dtype == "fp32" else total) < ROUNDING[case.dtype]


@pytest.mark.parametrize(
    "cases",
    [
        [Case(stage=1), Case(stage=2, model="RepeatedLayers", accumulation=2)],
        [Case(stage=2, dtype="bf16"), Case(stage=1, accumulation=3)],
        [Case(stage=1, dtype="bf16", backend="inductor"), Case(stage=2, backend="inductor")],
        [Case(stage=1), Case(stage=1, deepcompile=False)],
        [
            Case(stage=1, model="BlocksWithin", config={"compile": {"overlap_param_gather": True}}),
            Case(stage=2, model="BlocksWithin"),
        ],
    ],
    ids=["stages", "dtypes", "inductor", "one without DeepCompile", "blocks"],
)
def test_two_engines_of_different_kinds(ranks, cases):
    check(ranks(2).run(engines.take_turns, cases), cases)


def test_turns_in_another_order(ranks):
    for raised, moved in ranks(2).run(engines.turns_in_another_order, Case(bucket=50)):
        assert len(raised) == 2 and all("ranks have reduced different gradients" in message for message in raised)
        assert not any(moved)


def test_one_loss_of_two_engines(ranks):
    cases = [Case(stage=1), Case(stage=2, model="SeveralGraphs")]
    check(ranks(2).run(engines.one_loss_of_two_engines, cases), cases)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model", ["OneGraph", "RepeatedLayers", "EagerBlocks"])
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
def test_two_forwards_before_a_backward(ranks, direct, model, stage):
    case = Case(model=model, stage=stage)
    check([[errors] for errors in ranks(2).run(engines.forwards_before_a_backward, case, direct)], [case])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("how", ["engine", "loss", "both"])
def test_several_backwards_of_one_forward(ranks, how, stage):
    case = Case(model="SeveralGraphs", stage=stage, config={"wall_clock_breakdown": how == "both"})
    check([[errors] for errors in ranks(2).run(engines.backwards_of_one_forward, case, how)], [case])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_engines_of_one_module_destroyed(ranks, order):
    for compiled, trained in ranks(2).run(engines.destroyed_in_order, Case(), order):
        assert compiled is None and trained


@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("model", ["OneGraph", "BlocksWithin", "EagerBlocks"])
def test_second_engine_of_a_module(ranks, model, stages):
    for error, raised, moved, error_again in ranks(2).run(engines.second_engine, Case(model=model), stages):
        assert error < BOUND
        # One sentence, whatever the first engine is asked for.
        for sentence in raised:
            assert sentence is not None and "engine" in sentence and "\n" not in sentence, raised
        assert moved == 0 and error_again < BOUND


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("direct, both", [(False, True), (False, False), (True, False)])
def test_computed_again(ranks, direct, both, stage):
    if direct and torch.cuda.is_available():
        pytest.skip("gradients are dropped on a GPU: docs/reliability.md has it among the limits")
    case = Case(stage=stage)
    check([[errors] for errors in ranks(2).run(engines.computed_again, case, direct, both)], [case])


@pytest.mark.parametrize("model", ["OneGraph", "EagerBlocks"])
def test_module_called(ranks, model):
    case = Case(model=model)
    check([[errors] for errors in ranks(2).run(engines.module_called, case)], [case])


def test_a_second_compile(ranks):
    case = Case(stage=2)
    check([[errors] for errors in ranks(2).run(engines.compiled_again, case)], [case])


def test_steps_in_other_threads(ranks):
    cases = [Case(stage=1, accumulation=2), Case(stage=2, model="EagerBlocks")]
    check(ranks(2).run(engines.in_other_threads, cases), cases)


OVERLAPPED = {"compile": {"overlap_param_gather": True}}


@pytest.mark.parametrize(
    "moment, case",
    [
        *zip(
            engines.MOMENTS,
            # ZeRO-2 has no no_sync().
            itertools.cycle([Case(stage=1, accumulation=2, bucket=50), Case(stage=2, bucket=50)]),
        ),
        ("behind a step", Case(stage=1, config=OVERLAPPED)),
        ("behind a backward", Case(stage=2, config=OVERLAPPED)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.stage}-{value.accumulation}-{bool(value.config)}",
)
def test_destroyed_at_any_moment(ranks, moment, case):
    for counters, before, after, gone, error, error_again in ranks(2).run(engines.destroyed_at, moment, case):
        assert counters == NOTHING
        assert after == before
        assert gone
        assert max(error, error_again) < BOUND


def test_process_groups_that_torch_wraps(ranks):
    # Torch's wrapper compares what ranks are about to send. DeepSpeed makes groups with a longer timeout than this.
    pool = ranks(2, TORCH_DISTRIBUTED_DEBUG="DETAIL", RANKS_TIMEOUT="60")
    for case in (Case(stage=1, accumulation=2, bucket=50), Case(stage=2, model="BlocksWithin", config=OVERLAPPED)):
        for (worst, _), seconds in pool.run(engines.beside_plain_loop_in_wrapped_groups, case):
            assert worst < BOUND
            assert seconds == 60


def test_a_long_run(ranks, request):
    steps = request.config.getoption("--steps")
    # What a thread caches of the C heap counts as in use there, and the caches fill for hundreds of steps.
    pool = ranks(2, GLIBC_TUNABLES="glibc.malloc.tcache_count=0")
    for most_held, samples, (worst, _) in pool.run(engines.long_run, Case(), steps, 50, timeout=steps):
        assert most_held == 0
        assert worst < BOUND
        (allocated, objects), *later = samples
        # A tensor of the smallest parameter, kept in each step, would be many times that.
        assert max(memory for memory, _ in later) - allocated < 2**12
        assert max(count for _, count in later) - objects < 50
