# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine that compiles itself does so outside of all that its caller has opened around the first forward."""

import pytest

from support.contexts import ALL, TRANSFORMS, first_call, same
from support.ids import vary
from support.on_ranks import on_ranks


def compare(name, section, **case):
    """Returns whether an engine that comes to what one without DeepCompile does is compiled."""
    plain = first_call(name, {"deepcompile": False}, **case)
    compiled = first_call(name, {"deepcompile": True, **section}, **case)
    assert compiled.raised == plain.raised and same(plain, compiled)
    return compiled.is_compiled


@pytest.mark.follows("leave it out, or call the engine outside of these")
@vary("name", ALL)
@vary("section", [{"regional_compilation": True}], slow=[{}])
@on_ranks(1)
def test_a_context_around_the_first_forward(name, section):
    """What the set-up computes would have no numbers under torch.func, or be counted, recorded, refused or fake."""
    # Evaluation does not compile an engine.
    assert compare(name, section) == (name not in ("inference", "no_grad"))


@vary("name", TRANSFORMS)
@vary("stage", [1, 2])
@on_ranks(1)
def test_a_transform_of_an_engine_that_accumulates(name, stage):
    """Gradients of a transform would be divided by the number of micro-batches, as those of parameters are."""
    assert compare(name, {}, stage=stage, accumulation=4)
