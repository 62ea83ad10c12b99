# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own Muon with models and parameter groups of many kinds, beside DeepSpeed without DeepCompile."""

import pytest

from support.ids import vary
from support.muon import Training, check, train_beside


# Each shows something of its own.
@pytest.mark.table
@vary(
    "world, varied",
    [
        (2, {"model": "Frozen", "stage": 2}),
        (2, {"model": "Tied", "torch_adam": True}),
        (2, {"model": "Slim", "torch_adam": True, "recorded": True}),
        (2, {"model": "OnlyMatrices"}),
        (2, {"model": "NoMatrices", "stage": 2}),
        (2, {"optimizer": "grouped", "stage": 2}),
        # In this order the processes of three ranks start once.
        (3, {"model": "Filters3", "stage": 2}),
        (3, {"model": "OneSmallMatrix"}),
    ],
)
def test_models_train_as_without_deepcompile(ranks, world, varied):
    training = Training(compiled=False, **varied)
    for result in check(ranks(world).run(train_beside, training)):
        assert result.rates == result.rates_of_base
        assert bool(result.owners) == (training.model != "NoMatrices")
        # Of the caller's groups the first has a rate of its own, and each becomes two.
        assert training.optimizer != "grouped" or result.rates[0] == [0.005, 0.005, 0.02, 0.01]


def test_filters_train_as_the_matrix_that_they_are(ranks):
    """DeepSpeed's own function cannot update filters in four dimensions, so it trains a model that has the matrix."""
    training = Training(model="Filters4", base_model="Filters2", compiled=False)
    check(ranks(2).run(train_beside, training))


def test_an_optimizer_of_the_caller_goes_by_its_groups(ranks):
    """DeepSpeed trains as plain SGD what is in a group with use_muon and lacks the tag, so there it has tags."""
    check(ranks(2).run(train_beside, Training(optimizer="made", compiled=False)))
