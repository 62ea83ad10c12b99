# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ranks of which one has a reason not to compile yet, in calls in which an engine compiles itself."""

import torch
import torch.distributed as dist

from support.on_ranks import on_ranks
from support.training import BOUND, Case, batch, build, compile_backend, engine_by_configuration, relative_error


def train_with_a_gradient(deepcompile):
    """Rank 0 holds a gradient of nobody's before the first forward."""
    torch._dynamo.reset()
    module = build(Case())
    with compile_backend("eager"):
        engine = engine_by_configuration(module, deepcompile)
        first, compiled = next(module.parameters()), []
        if dist.get_rank() == 0:
            first.grad = torch.zeros_like(first)
        for step in range(3):
            engine.backward(engine(batch(step, 0, dist.get_rank(), 4)))
            engine.step()
            compiled.append(engine.is_compiled)
    engine.destroy()
    return compiled, [parameter.detach().clone() for parameter in module.parameters()]


@on_ranks(2)
def test_a_gradient_on_one_rank():
    """One rank would compile in its first forward while the other goes on without, and each wait for the other."""
    _, plain = train_with_a_gradient(False)
    compiled, parameters = train_with_a_gradient(True)
    # After the first step, which has used that gradient.
    assert compiled == [True] * 3 and relative_error(parameters, plain) < BOUND
