# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.regional_compilation`` cannot do, and says before anything is changed."""

import pytest

from support.ids import vary
from support.refusals import Refusal, check_refused, refuse
from support.training import BOUND

# By the name under which docs/reference/options.md has them.
REFUSED = {
    "compile.regional_compilation": Refusal(
        "compile.regional_compilation=true found no blocks that repeat in FillsPartition; name their classes in a "
        "list, or set it to false",
        config={"compile": {"regional_compilation": True}},
        amends={"regional_compilation": ["Linear"]},
    ),
}

# The same option in other words.
ALSO_REFUSED = {
    "regional_compilation-unknown-class": Refusal(
        "compile.regional_compilation names ['Layer'], but FillsPartition has no such module outside of another "
        "block; use the names of its blocks' classes",
        config={"compile": {"regional_compilation": ["Linear", "Layer"]}},
        amends={"regional_compilation": ["Linear"]},
    ),
    "regional_compilation-fullgraph": Refusal(
        "compile_kwargs['fullgraph'] contradicts compile.regional_compilation, which makes a graph of every block; "
        "leave one of them out",
        config={"compile": {"regional_compilation": ["Linear"]}},
        arguments={"backend": "eager", "compile_kwargs": {"fullgraph": True}},
        amends={"regional_compilation": False},
    ),
}


@pytest.mark.follows(
    "has no such module outside of another block; {}",
    "found no blocks that repeat in {}; name their classes in a list",
    "use the names of its blocks' classes",
    "which makes a graph of every block; leave one of them out",
)
@pytest.mark.quick
@vary("name", [*REFUSED, *ALSO_REFUSED])
def test_refused(ranks, name):
    """An option that cannot be honoured would be ignored, or its refusal would not say what to do or not help."""
    check_refused(ranks, {**REFUSED, **ALSO_REFUSED}[name])


def test_training_after_a_refusal(ranks):
    """A refused engine would keep hooks on its module."""
    for refused in ranks(2).run(refuse, REFUSED["compile.regional_compilation"], trains=True):
        assert refused.error < BOUND
