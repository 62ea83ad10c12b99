# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Engines that shard their parameters, what they train, and what is left of it to compare with whole parameters."""

import torch
import torch.distributed as dist

from deepspeed.compile.features.shard_parameters import unsharded_parameters
from deepspeed.compile.features.shard_parameters.at_rest import Resharded
from deepspeed.compile.features.shard_parameters.feature import sharded_blocks
from deepspeed.compile.fixes.base.subclasses import plain_tensors

from support.frozen import freeze
from support.training import Case, batch, device, make_engine


def section(shards, **options):
    """Returns a configuration in which each block is a graph. ``shards``: "all", "frozen" or, for whole ones, None."""
    return {"compile": {"regional_compilation": True, **({"shard_parameters": shards} if shards else {}), **options}}


SHARDED, FROZEN, WHOLE = section("all"), section("frozen"), section(None)


def engine_of(build, config, trained="all", optimizer=None, **case):
    """Makes a module and its engine.

    Args:
        build: makes the module.
        trained: as for ``freeze()``.
        optimizer: parameters -> optimizer; None: that of the case.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = build().to(device())
    freeze(module, trained)
    arguments = {"optimizer": optimizer(module.parameters())} if optimizer else {}
    return module, make_engine(module, Case(config=config, **{"adam": True, **case}), **arguments)


def losses_of(engine, steps=3, forward=None, evaluate=None, skips=False):
    """Trains, and returns losses and the results of evaluations.

    Args:
        forward: step, micro step -> loss; None: calls the engine.
        evaluate: step -> result, behind each step; None: nothing.
        skips: whether the engine is told in each other step to leave out blocks.
    """

    def call(step, micro_step):
        return engine(batch(step, micro_step, dist.get_rank(), 4), skips and step % 2 == 0)

    found = []
    for step in range(steps):
        for micro_step in range(engine.gradient_accumulation_steps()):
            loss = (forward or call)(step, micro_step)
            engine.backward(loss)
            engine.step()
            found.append(loss.detach())
        if evaluate is not None:
            engine.eval()
            with torch.no_grad():
                found.append(evaluate(step))
            engine.train()
    return found


def parameters_at_rest(module):
    return sum(isinstance(parameter, Resharded) for parameter in module.parameters())


def units_at_rest(engine):
    sharded = sharded_blocks(engine)
    return 0 if sharded is None else sum(not unit.is_gathered for unit in sharded.units)


def end(engine, module=None):
    """Destroys an engine, whose module keeps its values. Returns those of ``module``, if it is given."""
    with unsharded_parameters(engine):
        parameters = module.parameters() if module is not None else ()
        found = [tensor.clone() for tensor in plain_tensors(parameter.detach() for parameter in parameters)]
        engine.destroy()
    return found


def same(first, second):
    """Says whether each pair of tensors has the same bits."""
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))
