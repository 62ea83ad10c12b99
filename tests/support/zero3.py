# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in ``test_zero3.py``."""

import copy
import dataclasses

import torch
import torch.distributed as dist

import deepspeed

from support.training import average_gradients, batch, build, make_engine, make_optimizer, relative_error


def train_zero3(case):
    """Trains with ZeRO-3 under DeepCompile beside a plain loop.

    Returns the error of the parameters, and by how many bytes memory has grown from the end of the first backward's
    step to the end of the last one's and from before the first forward.
    """
    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    engine = make_engine(module, dataclasses.replace(case, deepcompile=True))
    optimizer = make_optimizer(plain, case)
    # Libraries keep a workspace of 32 MiB or more from their first call on.
    plain(batch(0, 0, dist.get_rank(), 4)).backward()
    plain.zero_grad()
    before, after_steps = torch.cuda.memory_allocated(), []
    for step in range(case.steps):
        loss = engine(batch(step, 0, dist.get_rank(), 4))
        engine.backward(loss)
        engine.step()
        del loss
        after_steps.append(torch.cuda.memory_allocated() - before)
        plain(batch(step, 0, dist.get_rank(), 4)).backward()
        average_gradients(plain)
        optimizer.step()
        optimizer.zero_grad()
    errors = []
    for trained, expected in zip(module.parameters(), plain.parameters()):
        with deepspeed.zero.GatheredParameters([trained]):
            errors.append(relative_error([trained], [expected]))
    engine.destroy()
    return max(errors), after_steps
