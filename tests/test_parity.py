# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Training under DeepCompile gives the parameters of a plain loop, whatever the model's graphs are like."""

import pytest

from support.ids import sanitized, vary
from support.models import CASES
from support.training import Case, check_trained, train_beside_plain_loop


@pytest.mark.quick
@pytest.mark.table
@vary(
    "stage, accumulation, model, backend",
    [
        # The first of three micro-batches does what a single one does.
        *(sanitized(stage, 3, model, "eager") for model in CASES for stage in (1, 2)),
        *((*varied, model, "inductor") for model in CASES for varied in [(1, 3), (2, 1)]),
    ],
)
def test_table(ranks, stage, accumulation, model, backend):
    case = Case(model=model, stage=stage, accumulation=accumulation, backend=backend)
    check_trained(ranks(2).run(train_beside_plain_loop, case))


@pytest.mark.quick
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
    # Autograd's way gives the same numbers, so only the counters tell that graphs reduce what they can.
    for result in check_trained(ranks(2).run(train_beside_plain_loop, Case(model=model, steps=1, bucket=10**6))):
        assert result.counters["from_graphs"] == from_graphs
        assert result.counters["from_autograd"] == from_autograd


@vary(
    "varied",
    [
        sanitized({"skip_on_odd_steps": True, "steps": 5}),
        sanitized({"skip_on_odd_steps": True, "steps": 5, "accumulation": 3}),
        {"vary_length": True, "steps": 6, "backend": "inductor"},
        sanitized({"evaluate_between": True}),
        sanitized({"groups": 3}),
        sanitized({"groups": 2, "clipping": 0.05}),
        sanitized({"config": {"zero_optimization": {"round_robin_gradients": True}}}),
        sanitized({"bucket": 1}),
        sanitized({"bucket": 10**9}),
    ],
)
@vary("stage", [1, 2])
def test_variations(ranks, stage, varied):
    check_trained(ranks(2).run(train_beside_plain_loop, Case(stage=stage, **varied)))


@pytest.mark.sanitized
@vary("model", ["TiedEmbedding", "WeightInTwoGraphs", "CompiledAndEager"])
def test_contributions_to_one_parameter_in_one_bucket(ranks, model):
    for stage in (1, 2):
        check_trained(ranks(2).run(train_beside_plain_loop, Case(model=model, stage=stage, bucket=10**6)))


@vary("model", ["OneGraph", "OddSizes", "FillsPartition", "FewParameters"])
# All of three ranks, then all of four: their processes take seconds to start.
@vary("world", [3, 4])
def test_layouts(ranks, world, model):
    for stage in (1, 2):
        for groups in (1, 2):
            if model != "FewParameters" or groups == 1:
                check_trained(ranks(world).run(train_beside_plain_loop, Case(model=model, stage=stage, groups=groups)))
