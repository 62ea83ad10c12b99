# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine that compiles itself does so outside of all that its caller has opened around the first forward."""

import pytest

from support.contexts import ALL, TRANSFORMS, first_call, same
from support.ids import vary


def compare(name, section, **case):
    plain = first_call(name, {"deepcompile": False}, **case)
    compiled = first_call(name, {"deepcompile": True, **section}, **case)
    return plain, compiled, same(plain, compiled)


@pytest.mark.follows("leave it out, or call the engine outside of these")
@vary("name", ALL)
@vary("section", [{"regional_compilation": True}, pytest.param({}, marks=pytest.mark.slow)])
def test_a_context_around_the_first_forward(ranks, name, section):
    """What the set-up computes would have no numbers under torch.func, or be counted, recorded, refused or fake."""
    for plain, compiled, is_same in ranks(1).run(compare, name, section):
        assert compiled.raised == plain.raised and is_same
        # Evaluation does not compile an engine.
        assert compiled.is_compiled == (name not in ("inference", "no_grad"))


@vary("name", TRANSFORMS)
@vary("stage", [1, 2])
def test_a_transform_of_an_engine_that_accumulates(ranks, name, stage):
    """Gradients of a transform would be divided by the number of micro-batches, as those of parameters are."""
    for plain, compiled, is_same in ranks(1).run(compare, name, {}, stage=stage, accumulation=4):
        assert compiled.raised == plain.raised and is_same and compiled.is_compiled
