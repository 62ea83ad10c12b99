# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.store_param_remainders`` cannot do, and says before anything is changed."""

import pytest

from support.ids import vary
from support.refusals import Refusal, check_refused

# By the name under which docs/options.md has them.
REFUSED = {
    "compile.store_param_remainders": Refusal(
        "compile.store_param_remainders is for Adam and AdamW of torch and DeepSpeed, not for SGD; use one of these, "
        "or leave compile.store_param_remainders out",
        config={"compile": {"store_param_remainders": True}},
        amends={"store_param_remainders": False},
    ),
}


@pytest.mark.follows("{} {}, or leave {} out")
@pytest.mark.quick
@vary("name", [*REFUSED])
def test_refused(ranks, name):
    """An option that cannot be honoured would be ignored, or its refusal would not say what to do or not help."""
    check_refused(ranks, REFUSED[name])
