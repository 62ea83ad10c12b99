# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How few messages and buckets reduce the gradients of a backward."""

import pytest

from support import messages
from support.training import NOTHING, Case

BOUND = 1e-5
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
WHOLE_MODEL = 10**6  # elements of a bucket
# The block has six; the embedding and the head are beside it.
PARAMETERS = 8


def check(results):
    """Returns the counters of each backward, which are those of rank 0, because all ranks send the same."""
    for seen, error, after in results:
        assert error < BOUND
        assert after == NOTHING
        for name in ("buckets_sent", "messages_sent", "from_graphs", "from_autograd", "peak_pending"):
            assert [counters[name] for counters in seen] == [counters[name] for counters in results[0][0]], name
    return results[0][0]


@pytest.mark.parametrize("config", [None, ROUND_ROBIN], ids=["in-order", "by-turns"])
# All of three ranks, then all of two, as the other tests: processes take seconds to start.
@pytest.mark.parametrize("world", [3, 2])
def test_small_gradients_of_one_owner_share_a_message(ranks, world, config):
    for stage in (1, 2):
        case = Case(stage=stage, bucket=WHOLE_MODEL, config=config)
        for counters in check(ranks(world).run(messages.many_parameters, case, count=100, numel=7)):
            assert (counters["buckets_sent"], counters["messages_sent"]) == (1, world)


def test_gradients_whose_owners_take_turns_need_one_copy_more(ranks):
    # A bucket is sent with ten gradients, and gathered while one is on its way.
    half = 10 * 8
    case = Case(bucket=2 * half, config=ROUND_ROBIN)
    for counters in check(ranks(2).run(messages.many_parameters, case, count=100, numel=8)):
        assert (counters["buckets_sent"], counters["messages_sent"]) == (10, 2 * 10)
        assert counters["peak_pending"] == 4 * 2 * half
        assert counters["peak_bucket"] <= 4 * 2 * half


@pytest.mark.parametrize("model", messages.MODELS)
@pytest.mark.parametrize("stage, accumulation", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_uses_of_one_block_are_reduced_together(ranks, stage, accumulation, model):
    # Each gradient has a bucket of its own.
    case = Case(model=model, stage=stage, accumulation=accumulation, bucket=1)
    seen = check(ranks(2).run(messages.shared_block, case, [6] * 3 * accumulation))
    received = {counters["from_graphs"] + counters["from_autograd"] for counters in seen}
    reducing = [counters["buckets_sent"] for counters in seen if counters["buckets_sent"]]
    assert len(reducing) == (3 if stage == 1 else 3 * accumulation)
    # Nobody knows in the first backward how many contributions are to come.
    assert reducing == [received.pop(), *[PARAMETERS] * (len(reducing) - 1)]
    assert not received


def test_a_gradient_that_was_not_sent_yet_takes_what_comes(ranks):
    numel = sum(parameter.numel() for parameter in messages.SharedBlock().parameters())
    for counters in check(ranks(2).run(messages.shared_block, Case(model="SharedBlock", bucket=WHOLE_MODEL), [6] * 3)):
        assert counters["from_graphs"] == 6 * 6 + 2
        assert counters["peak_pending"] == 4 * numel


@pytest.mark.parametrize("bucket", [1, 150, WHOLE_MODEL])
@pytest.mark.parametrize("stage, accumulation", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_uses_that_vary(ranks, stage, accumulation, bucket):
    case = Case(model="SharedWithEagerUses", stage=stage, accumulation=accumulation, bucket=bucket)
    check(ranks(2).run(messages.shared_block, case, [6, 6, 2, 6, 0, 1, 6, 3, 8, 5, 5, 6]))


def test_two_uses_are_sent_one_by_one(ranks):
    # A sum would be held from the first to the second, and those of an embedding and a head are far apart.
    case = Case(model="SharedBlock", bucket=1)
    for counters in check(ranks(2).run(messages.shared_block, case, [2] * 3)):
        assert counters["buckets_sent"] == 6 * 2 + 2
        assert counters["peak_unreduced"] == 0
