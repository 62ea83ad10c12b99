# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where elements of parameters lie on disk, for any parameters and any number of ranks."""

import bisect
import contextlib
import functools
import threading
from unittest import mock

import pytest
import torch
from core.test_layout import layouts_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepspeed.compile.features.checkpoints import order
from deepspeed.compile.features.checkpoints.order import BaseOrder
from deepspeed.compile.zero_1_and_2.layout import SHARD_MULTIPLE
from deepspeed.compile.zero_1_and_2.parameter.runs import in_flat_tensor

from support.threads import in_threads


class Exchange:
    """All-to-all between threads, each of which stands for a rank."""

    def __init__(self, world):
        self.barrier, self.sent, self.local = threading.Barrier(world, timeout=30), {}, threading.local()

    def all_to_all_single(self, output, given, output_split_sizes, input_split_sizes, group):
        self.sent[self.local.rank] = given.split(input_split_sizes)
        self.barrier.wait()
        output.copy_(torch.cat([self.sent[rank][self.local.rank] for rank in range(len(output_split_sizes))]))
        assert [len(self.sent[rank][self.local.rank]) for rank in range(len(output_split_sizes))] == output_split_sizes
        self.barrier.wait()


def on_all_ranks(world, call):
    """Returns what a function of a rank returns on each, with an exchange between them."""
    exchange, results = Exchange(world), [None] * world

    def run(rank):
        exchange.local.rank = rank
        results[rank] = call(rank)

    alone = mock.patch.object(order, "every_rank_raises", lambda *_: contextlib.nullcontext())
    with mock.patch.object(order, "dist", exchange), alone:
        in_threads([functools.partial(run, rank) for rank in range(world)], exchange.barrier.abort)
    return results


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), max_size=8),
    st.sampled_from([600, 5000, 10**6]),
)
# One rank has padding alone, in either order.
@example(4, [(0, 3)], 600)
def test_exchange_with_the_order_on_disk(world, sizes, at_once):
    """A checkpoint would have an element of another place, or an engine would go on from another place's element."""
    firsts, end = [], 0
    for gap, numel in sizes:
        firsts.append(end + gap)
        end += gap + numel
    layouts = layouts_of(world, [numel for _, numel in sizes])
    cpu = torch.device("cpu")
    orders = [BaseOrder(layout, firsts, 2, None, cpu) for layout in layouts]
    numel = orders[0].numel
    # Elements are numbered from 1 on; 0 is padding.
    whole, flat = torch.zeros(world * numel, dtype=torch.int32), torch.zeros(layouts[0].flat_numel, dtype=torch.int32)
    count = 1
    for first, place in zip(firsts, layouts[0].places, strict=True):
        numbers = torch.arange(count, count + place.numel, dtype=torch.int32)
        whole[first : first + place.numel] = flat[place.first : place.first + place.numel] = numbers
        count += place.numel
    parts, shards = whole.chunk(world), [in_flat_tensor(flat, layout) for layout in layouts]
    shards = [runs.read(0, runs.numel) for runs in shards]
    if not count - 1:
        return
    with mock.patch.object(order, "EXCHANGED_NUMEL", at_once):
        found = on_all_ranks(world, lambda rank: orders[rank].to_base(shards[rank], "cpu"))
        assert all(map(torch.equal, found, parts))
        back = on_all_ranks(world, lambda rank: orders[rank].to_even(found[rank], "cpu"))
        assert all(map(torch.equal, back, shards))
    # Values of blocks: those of their first elements.
    saved_blocks = pytest.importorskip("deepspeed.compile.features.update.saved_blocks")
    block = SHARD_MULTIPLE
    of_blocks = [shard.view(-1, block)[:, 0] for shard in shards]
    in_base = on_all_ranks(world, lambda rank: saved_blocks.blocks_to_base(orders[rank], of_blocks[rank]))
    begins = sorted({int(number) for values in of_blocks for number in values if number})
    for part, values in zip(parts, in_base):
        elements = [int(number) for number in part if number]
        expected = [begins[bisect.bisect(begins, number) - 1] for number in elements]
        assert values.tolist() == list(dict.fromkeys(expected))
    again = on_all_ranks(world, lambda rank: saved_blocks.blocks_to_even(orders[rank], in_base[rank], cpu, 0))
    assert all(map(torch.equal, again, of_blocks))
