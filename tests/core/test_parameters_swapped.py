# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A step writes to parameters that a caller has given other memory, also if these are only some."""

import torch.distributed as dist

from support.beside import Beside, check
from support.training import Case, batch, build


def swap_one(case):
    pair = Beside(build(case), case)
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
        parameter = next(pair.module.parameters())
        parameter.data = parameter.data.clone()
    pair.step(batch(2, 0, dist.get_rank(), 4))
    return pair.end()


def test_one_parameter_that_was_given_other_memory(ranks):
    """The parameter would keep its value, because the others lie where the optimizer has put them."""
    check(ranks(2).run(swap_one, Case(stage=2)))
