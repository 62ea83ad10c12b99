# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A backward after one that raised, with no forward in between."""

import copy

import pytest
import torch.distributed as dist

from support.training import BOUND, Case, batch, build, make_engine, make_optimizer, relative_error, step_plain


def explode(gradient):
    raise ArithmeticError("a hook of the user raises")


def two_forwards_first(case):
    """Returns the error of the parameters after two forwards, a backward that raised, and the other's backward."""
    module = build(case)
    plain, engine = copy.deepcopy(module), make_engine(module, case)
    rank = dist.get_rank()
    handle = module.embedding.register_forward_hook(lambda *args: args[-1].register_hook(explode) and None)
    raises = engine(batch(9, 0, rank, 4))
    handle.remove()
    loss = engine(batch(0, 0, rank, 4))
    with pytest.raises(ArithmeticError):
        raises.backward()
    loss.backward()
    engine.step()
    plain(batch(0, 0, rank, 4)).backward()
    step_plain(plain, make_optimizer(plain, case))
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error


@pytest.mark.core
def test_a_backward_without_a_forward_of_its_own(ranks):
    """DeepSpeed would take the backward for a part of the one that raised, and never end it."""
    assert max(ranks(2).run(two_forwards_first, Case(stage=2, bucket=50))) < BOUND
