# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, trained without DeepCompile and with it.

A dozen in every run; ``make models`` trains all in both stages, and prints a table of what came of them.
"""

import pytest

from support.architectures import ARCHITECTURES, IN_EVERY_RUN
from support.ids import case_ids
from support.models_table import PROPERTY
from support.trained_models import off_and_on

# Of the parameters after three steps, all together, in fp32.
BOUND = 1e-5


def pytest_generate_tests(metafunc):
    both = [(stage, name) for name in ARCHITECTURES for stage in (1, 2)]
    # One stage is enough for the dozen: what differs between the stages is tested elsewhere.
    dozen = [(1 + index % 2, name) for index, name in enumerate(IN_EVERY_RUN)]
    cases = both if metafunc.config.option.every_model else dozen
    metafunc.parametrize("stage, name", cases, ids=case_ids("stage, name", cases))


def test_trains_as_without_deepcompile(ranks, record_property, stage, name):
    pytest.importorskip("transformers")
    found = {"name": name, "stage": stage}
    record_property(PROPERTY, found)
    results = ranks(2).run(off_and_on, name, stage)
    found["error"] = max(result["error"] for result in results)
    found["from_graphs"], found["graphs"] = results[0]["from_graphs"], results[0]["graphs"]
    found["gradients"] = results[0]["from_graphs"] + results[0]["from_autograd"]
    for result in results:
        assert result["error"] < BOUND, result
        for off, on in zip(*result["losses"], strict=True):
            assert on == pytest.approx(off, rel=1e-4), result
        assert result["moved"] > 1e-3, "the parameters hardly changed, so agreement shows nothing"
        # What calls blocks that are compiled by themselves is not compiled: embeddings, norms.
        assert result["from_graphs"] > 2 * result["from_autograd"] and result["held"] == 0, result
