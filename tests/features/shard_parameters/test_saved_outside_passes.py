# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Autograd saves parameters that code outside of the engine's passes reads while they happen to be whole."""

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.shard_parameters.at_rest import Resharded
from deepspeed.compile.features.shard_parameters.feature import sharded_blocks

from support.frozen import MODELS, beside_whole
from support.ids import vary
from support.on_ranks import on_ranks
from support.sharded import WHOLE, engine_of, same, section
from support.training import batch


class Stopped(BaseException):
    """Is no Exception, as KeyboardInterrupt is none."""


def stop(*_):
    raise Stopped


def make(model, config, **case):
    return engine_of(MODELS[model], config, **case)


def loss_of(engine):
    return engine(batch(7, 0, dist.get_rank(), 4))


def penalty(engine, module):
    """Reads what is whole first, because a gather for the others may reshard what is whole."""
    sharded = sharded_blocks(engine)
    assert sharded is None or any(unit.is_gathered for unit in sharded.units), "no unit is whole"
    parameters = sorted(module.parameters(), key=lambda parameter: isinstance(parameter, Resharded))
    return sum(parameter.square().sum() for parameter in parameters)


def after_a_forward(engine, module):
    loss = loss_of(engine)
    penalized = penalty(engine, module)
    loss.backward()
    return penalized


def after_a_raised_forward(engine, module):
    hook = module.body.blocks[1].register_forward_pre_hook(stop)
    with pytest.raises(Stopped):
        loss_of(engine)
    hook.remove()
    penalized = penalty(engine, module)
    loss_of(engine).backward()
    return penalized


def after_a_raised_backward(engine, module):
    hook = module.body.blocks[1].register_full_backward_pre_hook(stop)
    with pytest.raises(Stopped):
        loss_of(engine).backward()
    hook.remove()
    return penalty(engine, module)


def after_a_raised_grad(engine, module):
    hook = module.body.blocks[1].register_full_backward_pre_hook(stop)
    with pytest.raises(Stopped):
        torch.autograd.grad(loss_of(engine), [module.head.weight, module.body.blocks[0].norm.weight])
    hook.remove()
    penalized = penalty(engine, module)
    loss_of(engine).backward()
    return penalized


@vary("read", [after_a_forward, after_a_raised_backward], slow=[after_a_raised_forward, after_a_raised_grad])
@vary("kept", [0], slow=[2])
@on_ranks(2)
def test_a_penalty_of_parameters_that_are_whole(read, kept):
    """The backward would read memory that was given back, and the process would die."""

    def work(engine, module, folder):
        read(engine, module).backward()
        engine.step()
        sharded = sharded_blocks(engine)
        if sharded is not None:
            loss_of(engine)
            assert not any(unit.memory.has_external_views for unit in sharded.units), "memory of a graph that is gone"

    assert same(*beside_whole(make, (section("all", keep_gathered=kept), WHOLE), work, ""))
