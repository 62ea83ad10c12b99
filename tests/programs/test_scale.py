# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What depends on the number of ranks: how large buckets are, and which collectives gather parameters."""

import contextlib
from typing import List, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.compile.zero_1_and_2.engine import set_up
from deepspeed.compile.zero_1_and_2.parameter import carrier
from deepspeed.compile.zero_1_and_2.parameter.carrier import grouped

from support.beside import Beside
from support.ids import vary
from support.on_ranks import on_ranks
from support.training import (
    BOUND,
    OVERLAPPED,
    Case,
    batch,
    build,
    check_trained,
    device,
    train_beside_plain_loop,
)

# More than the model has, so that buckets are sent by the number of ranks alone.
BUCKET = 10**6
WORLDS = [2, pytest.param(8, marks=pytest.mark.slow)]


@contextlib.contextmanager
def chosen(numel_of_a_rank, joined):
    """Within it engines choose for tiny models, in which nothing is sent before so many elements for each rank.

    ``joined``: of how few elements the shards of parameters are that are gathered together.
    """
    with (
        mock.patch.object(set_up, "SEND_NUMEL", 1),
        mock.patch.object(set_up, "SEND_NUMEL_OF_A_RANK", numel_of_a_rank),
        mock.patch.object(carrier, "JOINED_NUMEL", joined),
    ):
        yield


class Sent(NamedTuple):
    """What an engine has sent, and how far its parameters are from a plain loop's."""

    buckets: int  # of the first backward
    messages: int
    collectives: List[int]  # that gather parameters after the first step: the works of each unit
    parameters: List[int]  # of each unit
    error: float


def sent_by(case, numel_of_a_rank, joined=2**17):
    counters, works = [], []
    with chosen(numel_of_a_rank, joined):
        beside = Beside(build(case), case)
        in_use = beside.engine.optimizer._deepcompile.gather
        for step in range(case.steps):
            beside.step(batch(step, 0, dist.get_rank(), 4))
            counters.append(gradient_counters(beside.engine))
            works.append([len(in_use._works[unit][0]) for unit in sorted(in_use._works)])
        runs = [sum(map(len, unit)) for unit in in_use._runs]
        error = beside.end().error
    return Sent(counters[0]["buckets_sent"], counters[0]["messages_sent"], works[0], runs, error)


def without_memory(case):
    """What the benchmark's list of messages takes of a case's model, as if it were one unit."""
    parameters = list(build(case).to("meta").parameters())
    return parameters, [0] * len(parameters), [parameter.numel() for parameter in parameters]


@vary("world", WORLDS)
def test_buckets_grow_with_the_number_of_ranks(ranks, package, world):
    """On many ranks, messages to each would be too small for the network; or the model of the benchmark be wrong."""
    case = Case("RepeatedLayers", bucket=BUCKET, steps=2, config=OVERLAPPED)
    messages = package("messages")
    model = messages.Sizes(*without_memory(case))
    # As the benchmark computes it, for which the same reducer sends to ranks that are not there.
    computed = messages.reductions(model, world, BUCKET, send=100 * world)
    buckets = sum(message.bytes > 0 for message in computed)
    for sent in ranks(world).run(sent_by, case, numel_of_a_rank=100):
        assert (sent.buckets, sent.messages) == (buckets, sum(message.messages for message in computed))
        assert sent.error < BOUND
    assert buckets == {2: 5, 8: 2}[world]


@vary("joined", [2**17, 0])
@vary("world", WORLDS)
def test_how_parameters_are_gathered(ranks, world, joined):
    """Each small parameter of a unit would cost a collective, or large ones a copy."""
    case = Case("RepeatedLayers", steps=2, config=OVERLAPPED)
    for sent in ranks(world).run(sent_by, case, numel_of_a_rank=100, joined=joined):
        assert len(sent.parameters) > 2 and max(sent.parameters) > 1
        # NCCL makes one group of what is gathered alone; gloo has no groups.
        one = torch.cuda.is_available() or joined
        assert sent.collectives == ([1] * len(sent.parameters) if one else sent.parameters)
        assert sent.error < BOUND


@vary("joined", [2**17, 0])
@vary(
    "varied",
    [
        {"stage": 1, "accumulation": 2, "clipping": 0.1},
        {"stage": 2, "accumulation": 2, "groups": 3},
        {"stage": 1, "skip_on_odd_steps": True, "steps": 4},
        {"stage": 2, "evaluate_between": True},
    ],
)
@vary("world", WORLDS)
@on_ranks("world")
def test_trained_as_a_plain_loop_whatever_is_chosen(world, varied, joined):
    """A bucket or a unit of another size would be sent before it is complete."""
    with chosen(100, joined):
        case = Case("RepeatedLayers", bucket=BUCKET, config=OVERLAPPED, **varied)
        check_trained([train_beside_plain_loop(case)])


@pytest.mark.skipif(get_accelerator().device_name() == "cpu", reason="gloo has no groups of collectives")
@on_ranks(2)
def test_a_group_ends_where_a_collective_raises():
    """Every later collective of the process would wait in a group that never ends."""
    ones = torch.ones(4, device=device())
    with pytest.raises(ValueError), grouped(dist.group.WORLD, device()) as works:
        works.append(dist.broadcast(ones, 0, async_op=True))
        raise ValueError
    for work in works:
        work.wait()
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 4


def test_choices_of_the_sizes_that_train():
    """The choice for few and for many ranks would be another than the one that was measured and is documented."""
    assert [set_up.send_numel(count) for count in (2, 8, 32, 64, 1024)] == [2**25] * 3 + [2**26, 2**30]
    small, large, most = (0, 2**17), (0, 2**18), (0, 3 * 2**21)
    # Of two ranks. What is gathered together is bounded.
    assert carrier.in_messages([small, large, (5, 0), small], 2) == [[small, small], [large]]
    assert [len(message) for message in carrier.in_messages([most] * 3, 2**10)] == [1, 1, 1]
