# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where elements of parameters lie, in memory and on disk, for any parameters and any number of ranks."""

import bisect
import threading
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepspeed.compile.zero_1_and_2.layout import SHARD_MULTIPLE, Layout
from deepspeed.compile.zero_1_and_2.parameter import order
from deepspeed.compile.zero_1_and_2.parameter.order import BaseOrder
from deepspeed.compile.zero_1_and_2.parameter.runs import in_flat_tensor

WORLDS = st.integers(1, 40)
SIZES = st.lists(st.integers(0, 3000), max_size=12)


def parameters_of(sizes):
    return [(torch.nn.Parameter(torch.empty(numel, device="meta")), numel) for numel in sizes]


def layouts_of(world, sizes):
    parameters = parameters_of(sizes)
    return [Layout(parameters, world, rank) for rank in range(world)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(WORLDS, SIZES)
def test_layout(world, sizes):
    """An element would have two owners or none, or a piece would lie where the partition has another one."""
    layouts = layouts_of(world, sizes)
    one, numel = layouts[0], layouts[0].partition_numel
    assert all(layout.places == one.places and layout.partition_numel == numel for layout in layouts)
    assert numel % SHARD_MULTIPLE == 0 and one.flat_numel == world * numel
    # A parameter lies in one place, and each rank has an equal part of it, padded by as little as may be.
    end = 0
    for place, elements in zip(one.places, sizes, strict=True):
        assert (place.first, place.numel, place.first) == (end, elements, world * place.offset)
        assert elements <= world * place.shard < elements + world * SHARD_MULTIPLE
        done = 0
        for rank in range(world):
            piece = place.piece(rank)
            assert (piece.owner, piece.first, piece.offset) == (rank, place.first + done, place.offset)
            assert piece.source_offset == done and 0 <= piece.numel <= place.shard
            done += piece.numel
        assert done == elements
        end += world * place.shard
    assert end == one.flat_numel
    # Entries of gradients are those of pieces, and all padding.
    for rank, layout in enumerate(layouts):
        own, specs = [*layout.own_pieces()], layout.view_specs()
        assert own == [piece for piece in layout.pieces() if piece.owner == rank]
        assert sum(spec.numel for spec in specs) == numel and all(spec.numel > 0 for spec in specs)
        assert not any(spec.is_padding for spec in specs[:-1])
        assert [(piece.offset, piece.numel) for piece in own] == [
            (spec.offset, spec.numel) for spec in specs if not spec.is_padding
        ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(WORLDS, SIZES, st.data())
def test_runs_of_a_partition(world, sizes, data):
    """A new value would be written to another element of the flat tensor, or into another rank's shard."""
    rank = data.draw(st.integers(0, world - 1))
    layout = Layout(parameters_of(sizes), world, rank)
    flat = torch.arange(layout.flat_numel)
    runs = in_flat_tensor(flat, layout)
    expected = [torch.empty(0, dtype=torch.int64)]
    for place in layout.places:
        expected.append(flat[place.first :][rank * place.shard : (rank + 1) * place.shard])
    expected = torch.cat(expected)
    assert torch.equal(runs.read(0, runs.numel), expected)
    first, last = sorted(data.draw(st.tuples(*2 * [st.integers(0, runs.numel)])))
    assert torch.equal(runs.read(first, last), expected[first:last])
    runs.write(first, -expected[first:last])
    changed = flat != torch.arange(len(flat))
    assert torch.equal(changed.nonzero().view(-1), expected[first:last][expected[first:last] > 0])
    # What the update steps at once ends within the limit, and lies where it is said to lie.
    adam, limit = pytest.importorskip("deepspeed.compile.features.update.adam"), last
    while first < limit:
        end, memory = adam.stretch(runs, first, limit)
        assert first < end <= limit
        if memory is not None:
            assert torch.equal(memory, runs.read(first, end)) and memory.data_ptr() == flat[0:].data_ptr() + 8 * int(
                expected[first]
            )
        first = end


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
    exchange, results, errors = Exchange(world), [None] * world, []

    def run(rank):
        exchange.local.rank = rank
        try:
            results[rank] = call(rank)
        except BaseException as error:
            errors.append(error)
            exchange.barrier.abort()

    with mock.patch.object(order, "dist", exchange):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
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
