# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in ``test_messages.py``: training that could need a message for each gradient."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero12 import gradient_counters, reset_gradient_counters

from support.models import Model
from support.training import average_gradients, batch, device, held, make_engine, make_optimizer, relative_error


class ManyParameters(nn.Module):
    """``count`` vectors of ``numel`` elements, each used once."""

    def __init__(self, count, numel):
        super().__init__()
        self.vectors = nn.ParameterList(torch.full((numel,), 0.5 + index / count) for index in range(count))

    def forward(self, ids):
        x = torch.cat(list(self.vectors))
        return (x * (x + ids.float().mean())).square().mean()


class SharedBlock(Model):
    """Calls one block ``uses`` times, as ALBERT does. A graph serves the block, and others what is around it."""

    def __init__(self):
        super().__init__(depth=1)

    @torch.compiler.disable(recursive=False)
    def forward(self, ids, uses):
        x = self.enter(ids)
        for use in range(uses):
            x = self.use_block(x, use)
        return self.leave(x, ids)

    def use_block(self, x, use):
        return self.blocks[0](x)


class SharedCheckpointed(SharedBlock):
    def use_block(self, x, use):
        return checkpoint(self.blocks[0], x, use_reentrant=True)


class SharedWithEagerUses(SharedBlock):
    """Every other use is outside of the compiler."""

    def use_block(self, x, use):
        return self.use_eagerly(x) if use % 2 else self.blocks[0](x)

    @torch.compiler.disable
    def use_eagerly(self, x):
        return self.blocks[0](x)


MODELS = {cls.__name__: cls for cls in (SharedBlock, SharedCheckpointed, SharedWithEagerUses)}


def train(case, module, arguments):
    """Trains a module beside a plain loop.

    Args:
        case: the case, for all but the model.
        module: the model.
        arguments: for each micro-batch of the training, what ``forward`` takes besides the ids.

    Returns:
        What the counters said of each micro-batch's backward; the parameters' error; what was held at the end.
    """
    torch._dynamo.reset()
    module = module.to(device())
    plain = copy.deepcopy(module)
    engine = make_engine(module, case)
    optimizer = make_optimizer(plain, case)
    seen = []
    for number, further in enumerate(arguments):
        ids = batch(number, 0, dist.get_rank(), 4)
        loss = engine(ids, *further)
        reset_gradient_counters(engine)
        engine.backward(loss)
        seen.append(gradient_counters(engine))
        engine.step()
        (plain(ids, *further) / case.accumulation).backward()
        if (number + 1) % case.accumulation == 0:
            average_gradients(plain)
            optimizer.step()
            optimizer.zero_grad()
    error = relative_error(module.parameters(), plain.parameters())
    after = held(gradient_counters(engine))
    engine.destroy()
    return seen, error, after


def many_parameters(case, count, numel):
    """As :func:`train`."""
    return train(case, ManyParameters(count, numel), [()] * case.steps * case.accumulation)


def shared_block(case, uses):
    """As :func:`train`, with how often the block is used in each micro-batch."""
    torch.manual_seed(0)
    return train(case, MODELS[case.model](), [(number,) for number in uses])
