# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.copy_engines`` cannot do, and says before anything is changed."""

import pytest
import torch

from support.ids import vary
from support.refusals import Refusal, check_refused

SAYS = "compile.copy_engines cannot be honoured here: {}; set it to null or false"
# By the name under which docs/reference/options.md has them.
REFUSED = {
    "compile.copy_engines": Refusal(
        SAYS.format("only NVIDIA GPUs have the copy engines for it"),
        config={"compile": {"copy_engines": True}},
        amends={"copy_engines": None},
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have copy engines")
@pytest.mark.follows("set it to null or false")
@pytest.mark.quick
@vary("name", [*REFUSED])
def test_refused(ranks, name):
    """An option that cannot be honoured would be ignored, or its refusal would not say what to do or not help."""
    check_refused(ranks, REFUSED[name])
