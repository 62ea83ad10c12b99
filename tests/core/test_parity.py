# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Training under DeepCompile gives the parameters of a plain loop, whatever the model's graphs are like."""

import pytest

from support.ids import sanitized, vary
from support.models import CASES
from support.training import Case, check_trained, train_beside_plain_loop


def marks_of(model, backend):
    """Returns the marks of a case: one that is small enough generates code, and another one is quick."""
    if backend == "inductor":
        return () if model == "FillsPartition" else (pytest.mark.slow,)
    return (pytest.mark.sanitized, pytest.mark.quick) if model == "FewParameters" else (pytest.mark.sanitized,)


@pytest.mark.options("zero_optimization.stage", "gradient_accumulation_steps")
@pytest.mark.table
@vary(
    "stage, accumulation, model, backend",
    [
        pytest.param(stage, accumulation, model, backend, marks=marks_of(model, backend))
        for model in CASES
        for stage, accumulation, backend in [
            # The first of three micro-batches does what a single one does.
            *((1, 3, "eager"), (2, 3, "eager")),
            *((1, 3, "inductor"), (2, 1, "inductor")),
        ]
    ],
)
def test_table(ranks, stage, accumulation, model, backend):
    """A gradient that reaches a graph, or misses it, in one of these ways would be lost or added twice."""
    case = Case(model=model, stage=stage, accumulation=accumulation, backend=backend)
    check_trained(ranks(2).run(train_beside_plain_loop, case))


@pytest.mark.core
@pytest.mark.sanitized
@vary(
    "model, from_graphs, from_autograd",
    [
        ("OneGraph", 20, 0),
        ("RepeatedLayers", 20, 0),
        ("EagerBlocks", 2, 18),
        ("NotCompilable", 0, 20),
        ("Hooked", 19, 1),
    ],
    expects="from_graphs, from_autograd",
)
def test_each_gradient_takes_the_way_it_should(ranks, model, from_graphs, from_autograd):
    """Graphs would leave to autograd what they can reduce themselves, which gives the same numbers but late."""
    for result in check_trained(ranks(2).run(train_beside_plain_loop, Case(model=model, steps=1, bucket=10**6))):
        assert result.counters["from_graphs"] == from_graphs
        assert result.counters["from_autograd"] == from_autograd


@pytest.mark.table
@vary(
    "varied",
    [
        sanitized({"skip_on_odd_steps": True, "steps": 2}),
        sanitized({"skip_on_odd_steps": True, "steps": 2, "accumulation": 3}),
        {"vary_length": True, "steps": 3, "model": "FillsPartition"},
        pytest.param({"vary_length": True, "steps": 6, "backend": "inductor"}, marks=pytest.mark.slow),
        sanitized({"evaluate_between": True}),
        sanitized({"groups": 3}),
        sanitized({"groups": 2, "clipping": 0.05}),
        sanitized({"config": {"zero_optimization": {"round_robin_gradients": True}}}),
        sanitized({"bucket": 1}),
        sanitized({"bucket": 10**9}),
        # A second contribution to a parameter comes while the first is in the bucket.
        *(
            sanitized({"bucket": 10**6, "model": model})
            for model in ("TiedEmbedding", "WeightInTwoGraphs", "CompiledAndEager")
        ),
    ],
)
@vary("stage", [1, 2])
def test_variations(ranks, stage, varied):
    """A step would rely on the same parameters, lengths, groups or number of buckets as the step before it.

    Or the second contribution to a parameter would take the place of the first, which is still in the bucket.
    """
    check_trained(ranks(2).run(train_beside_plain_loop, Case(stage=stage, **varied)))


@pytest.mark.slow
@vary("model", ["OneGraph", "OddSizes", "FillsPartition", "FewParameters"])
@vary("stage, groups", [(1, 1), (1, 2), (2, 1), (2, 2)])
# All of three ranks, then all of four: their processes take seconds to start.
@vary("world", [3, 4])
def test_layouts(ranks, world, stage, groups, model):
    if model == "FewParameters" and groups == 2:
        pytest.skip("the model has one parameter")
    check_trained(ranks(world).run(train_beside_plain_loop, Case(model=model, stage=stage, groups=groups)))


def test_a_rank_in_the_middle(ranks):
    """A rank whose partition both begins and ends within a parameter would get a wrong part of its gradient."""
    check_trained(ranks(3).run(train_beside_plain_loop, Case(model="FillsPartition")))
