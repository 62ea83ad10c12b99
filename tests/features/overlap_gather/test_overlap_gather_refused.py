# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.overlap_param_gather`` cannot do, and says before anything is changed."""

import pytest

from support.ids import vary
from support.refusals import Refusal, check_refused

# By the name under which docs/reference/options.md has them.
REFUSED = {
    "compile.overlap_param_gather": Refusal(
        "compile.overlap_param_gather works on blocks, and the model is compiled as a "
        "whole, because no blocks repeat in FillsPartition; name its blocks' classes in compile.regional_compilation, "
        "or leave this out",
        config={"compile": {"overlap_param_gather": True}},
        amends={"regional_compilation": ["Linear"]},
    ),
}


@pytest.mark.follows("name its blocks' classes in compile.regional_compilation, or leave this out")
@pytest.mark.quick
@vary("name", [*REFUSED])
def test_refused(ranks, name):
    """An option that cannot be honoured would be ignored, or its refusal would not say what to do or not help."""
    check_refused(ranks, REFUSED[name])
