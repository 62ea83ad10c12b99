# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine that compiles itself does so outside of all that its caller has opened around the first forward."""

import pytest

from support.contexts import ALL, first_call, same
from support.ids import vary


def compare(name, section):
    plain, compiled = first_call(name, {"deepcompile": False}), first_call(name, {"deepcompile": True, **section})
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
