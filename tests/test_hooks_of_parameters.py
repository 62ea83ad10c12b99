# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A hook that a parameter gets too late for its graph is refused, and not left out in silence."""

import pytest
import torch.distributed as dist

from support.training import Case, batch, build, make_engine


def hooked_late(kind):
    """Returns the errors of two backwards, the second with a hook on a parameter whose graph is compiled."""
    engine = make_engine(build(Case()), Case())
    errors = []
    for step in range(2):
        loss = engine(batch(step, 0, dist.get_rank(), 4))
        if step == 1:
            getattr(engine.module.head.weight, kind)(lambda _: None)
        try:
            engine.backward(loss)
            errors.append(None)
        except RuntimeError as error:
            errors.append(str(error))
    engine.destroy()
    return errors


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_after_the_graph_was_compiled(ranks, kind):
    """The reducer would take the gradient past the hook."""
    for first, second in ranks(2).run(hooked_late, kind):
        assert first is None
        assert "'head.weight'" in second and "has a hook that its compiled graph does not call" in second
