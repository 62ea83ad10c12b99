# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.optimizer_states`` cannot do, and says before anything is changed."""

import pytest

from support.ids import vary
from support.refusals import Refusal, check_refused

# By the name under which docs/options.md has them.
REFUSED = {
    "compile.optimizer_states": Refusal(
        "compile.optimizer_states='8bit' is for Adam and AdamW of torch and DeepSpeed, not for SGD; use one of these, "
        "or leave compile.optimizer_states out",
        config={"compile": {"optimizer_states": "8bit"}},
        amends={"optimizer_states": None},
    ),
}


@pytest.mark.follows(
    "{} {}, or leave compile.optimizer_states out",
    "is for Adam and AdamW of torch and DeepSpeed, not for {}; use one of these",
)
@pytest.mark.quick
@vary("name", [*REFUSED])
def test_refused(ranks, name):
    """An option that cannot be honoured would be ignored, or its refusal would not say what to do or not help."""
    check_refused(ranks, REFUSED[name])
