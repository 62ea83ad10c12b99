# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own Muon with models and parameter groups of many kinds, beside DeepSpeed without DeepCompile."""

import pytest

from support.ids import vary
from support.muon import Training, check, train_beside


@pytest.mark.options("optimizer")
@pytest.mark.table
@vary(
    "varied",
    [
        pytest.param({"model": "Frozen", "stage": 2}, marks=pytest.mark.slow),
        {"model": "Tied", "torch_adam": True},
        pytest.param({"model": "Slim", "torch_adam": True}, marks=pytest.mark.slow),
        pytest.param({"model": "Slim", "torch_adam": True, "one_pass": True}, marks=pytest.mark.slow),
        {"model": "OnlyMatrices"},
        {"model": "NoMatrices", "stage": 2},
        {"model": "OneSmallMatrix"},
        {"model": "Filters3", "stage": 2},
        # DeepSpeed's own function cannot update filters in four dimensions, so it trains a model that has the matrix.
        pytest.param({"model": "Filters4", "base_model": "Filters2"}, marks=pytest.mark.slow),
        {"optimizer": "grouped", "stage": 2, "depth": 2},
        # DeepSpeed trains as plain SGD what is in a group with use_muon and lacks the tag, so there it has tags.
        {"optimizer": "made"},
    ],
)
def test_models_train_as_without_deepcompile(ranks, varied):
    """Each model or group shows something of its own, for example a rank, or an optimizer, without any matrix."""
    training = Training(**varied)
    for result in check(ranks(2).run(train_beside, training)):
        assert result.rates == result.rates_of_base
        assert bool(result.owners) == (training.model != "NoMatrices")
        # Of the caller's groups the first has a rate of its own, and each becomes two.
        assert training.optimizer != "grouped" or result.rates[0] == [0.005, 0.005, 0.02, 0.01]
