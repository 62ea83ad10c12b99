# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where elements of parameters lie in memory, for any parameters and any number of ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.compile.zero_1_and_2.layout import SHARD_MULTIPLE, Layout
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
            assert (piece.source_offset, piece.offset) == (done, place.offset) and 0 <= piece.numel <= place.shard
            done += piece.numel
        assert done == elements
        end += world * place.shard
    assert end == one.flat_numel
    # Entries of gradients are those of pieces, and all padding.
    for rank, layout in enumerate(layouts):
        own, specs = [*layout.own_pieces()], layout.view_specs()
        assert own == [piece for place in one.places if (piece := place.piece(rank)).numel]
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
