# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How few messages and buckets reduce the gradients of a backward."""

from typing import Any, Dict, List, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.beside import Beside, Outcome, check
from support.ids import vary
from support.models import Model
from support.training import Case, batch

ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
WHOLE_MODEL = 10**6  # elements of a bucket
BLOCK_PARAMETERS = 6
# The embedding and the head are beside the block.
PARAMETERS = BLOCK_PARAMETERS + 2


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


class Sent(NamedTuple):
    seen: List[Dict[str, Any]]  # the counters of each micro-batch's backward
    outcome: Outcome


def train(case, module, arguments):
    """Trains a module beside a plain loop.

    Args:
        case: the case, for all but the model.
        module: the model.
        arguments: for each micro-batch of the training, what ``forward`` takes besides the ids.
    """
    pair, seen = Beside(module, case), []
    for number, further in enumerate(arguments):
        pair.micro_batch(batch(number, 0, dist.get_rank(), 4), *further)
        seen.append(gradient_counters(pair.engine))
        if (number + 1) % case.accumulation == 0:
            pair.step_plain()
    return Sent(seen, pair.end())


def many_parameters(case, count, numel):
    """As :func:`train`."""
    return train(case, ManyParameters(count, numel), [()] * case.steps * case.accumulation)


def shared_block(case, uses):
    """As :func:`train`, with how often the block is used in each micro-batch."""
    return train(case, MODELS[case.model](), [(number,) for number in uses])


def check_sent(results):
    """Returns the counters of each backward, which are those of rank 0, because all ranks send the same."""
    for result in results:
        check([result.outcome])
        for name in ("buckets_sent", "messages_sent", "from_graphs", "from_autograd", "peak_pending"):
            assert [counters[name] for counters in result.seen] == [counters[name] for counters in results[0].seen], (
                name
            )
    return results[0].seen


@vary("config", [None, ROUND_ROBIN])
@vary("stage", [1, 2])
# All of three ranks, then all of two, as the other tests: processes take seconds to start.
@vary("world", [pytest.param(3, marks=pytest.mark.slow), 2])
def test_small_gradients_share_a_message(ranks, world, stage, config):
    """A bucket would be sent in a message for each gradient, or for each rank, instead of one."""
    case = Case(stage=stage, bucket=WHOLE_MODEL, config=config, steps=2)
    for counters in check_sent(ranks(world).run(many_parameters, case, count=40, numel=7)):
        assert (counters["buckets_sent"], counters["messages_sent"]) == (1, 1)


def test_gradients_that_share_messages_need_one_copy_more(ranks):
    """Gradients that are copied into messages by rank would need memory for more than one other bucket."""
    # A bucket is sent with ten gradients, whose shards need no padding, and gathered while one is on its way.
    half = 10 * 32
    case = Case(bucket=2 * half, steps=2)
    # In the first backward ranks have not seen yet in which order gradients arrive.
    for counters in check_sent(ranks(2).run(many_parameters, case, count=40, numel=32))[1:]:
        assert (counters["buckets_sent"], counters["messages_sent"]) == (4, 4)
        assert counters["peak_pending"] == 4 * 2 * half
        # A bucket that is on its way also has this rank's shards.
        assert counters["peak_bucket"] <= 4 * (2 * half + half // 2)


@vary("model", MODELS)
@vary("stage, accumulation", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_uses_of_one_block_are_reduced_together(ranks, stage, accumulation, model):
    """Each of several uses of a block would have its gradients reduced on their own, in a message each."""
    # Each gradient has a bucket of its own.
    case = Case(model=model, stage=stage, accumulation=accumulation, bucket=1)
    seen = check_sent(ranks(2).run(shared_block, case, [6] * 3 * accumulation))
    reducing = [counters["buckets_sent"] for counters in seen if counters["buckets_sent"]]
    backwards = 1 if stage == 1 else accumulation
    assert len(reducing) == 3 * backwards
    # Nobody knows in the first step how many contributions are to come. What comes late is reduced before the step.
    late = [0] * (backwards - 1) + [BLOCK_PARAMETERS]
    assert reducing == [PARAMETERS + gradient for gradient in late] + [PARAMETERS] * 2 * backwards


def test_a_gradient_that_was_not_sent_yet_takes_what_comes(ranks):
    """A bucket would hold a copy of a gradient for each use of its parameter."""
    numel = sum(parameter.numel() for parameter in SharedBlock().parameters())
    for counters in check_sent(ranks(2).run(shared_block, Case(model="SharedBlock", bucket=WHOLE_MODEL), [6] * 3)):
        assert counters["from_graphs"] == 6 * 6 + 2
        assert counters["peak_pending"] == 4 * numel


@vary("bucket", [1, 150, WHOLE_MODEL])
@vary("stage, accumulation", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_uses_that_vary(ranks, stage, accumulation, bucket):
    """A gradient would be sent before its last use, or wait for a use that does not come, if uses vary in number."""
    case = Case(model="SharedWithEagerUses", stage=stage, accumulation=accumulation, bucket=bucket)
    check_sent(ranks(2).run(shared_block, case, [6, 6, 2, 6, 0, 1, 6, 3, 8, 5, 5, 6]))


def test_two_uses_are_sent_one_by_one(ranks):
    """A sum would be held from the first to the second use, and those of an embedding and a head are far apart."""
    # Nobody knows in the first backward how many contributions are to come.
    case = Case(model="SharedBlock", bucket=1)
    for counters in check_sent(ranks(2).run(shared_block, case, [2] * 3))[1:]:
        assert counters["buckets_sent"] == 6 * 2 + 2
        assert counters["peak_unreduced"] == 0
