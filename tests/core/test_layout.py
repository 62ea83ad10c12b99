# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where elements of parameters lie, for any parameters and any number of ranks. Nothing is allocated."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.compile.zero_1_and_2.layout import Layout, Place

WORLDS = st.integers(1, 40)


def parameter_of(numel):
    return torch.nn.Parameter(torch.empty(numel, device="meta"))


def check(layouts):
    """Holds the layouts that the ranks of a process group have of one parameter group to what all code relies on."""
    pieces, numel, world = layouts[0].pieces, layouts[0].partition_numel, len(layouts)
    assert all(layout.pieces == pieces and layout.partition_numel == numel for layout in layouts)
    # Every element has one owner, and lies in one place.
    by_parameter = layouts[0].by_parameter()
    for parameter, first, elements in layouts[0].places:
        done = 0
        for piece in by_parameter.get(id(parameter), []):
            assert (piece.source_offset, piece.first) == (done, first + done) and piece.numel > 0
            done += piece.numel
        assert done == elements
        owners = [piece.owner for piece in by_parameter.get(id(parameter), [])]
        # The base keeps one address for each parameter and rank.
        assert len({*owners}) == len(owners)
    ends = [(first, first + elements) for _, first, elements in layouts[0].places]
    assert all(end <= first for (_, end), (first, _) in zip(ends, ends[1:]))
    assert not ends or ends[-1][1] <= world * numel
    # Pieces and padding fill each partition, in ascending order.
    filled = 0
    for rank, layout in enumerate(layouts):
        own = [*layout.own_pieces()]
        assert all(piece.owner == rank for piece in own)
        specs, end = layout.view_specs(), 0
        for spec in specs:
            assert spec.offset == end and spec.numel > 0
            end += spec.numel
        assert end == numel
        assert [(piece.offset, piece.numel) for piece in own] == [
            (spec.offset, spec.numel) for spec in specs if not spec.is_padding
        ]
        filled += sum(piece.numel for piece in own)
    assert filled == sum(elements for _, _, elements in layouts[0].places)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(WORLDS, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000)), max_size=12), st.integers(1, 4))
def test_layout_of_deepspeed(world, sizes, alignment):
    """An element would have two owners or none, or a piece would lie where the partition has another one."""
    places, end = [], 0
    for padding, numel in sizes:
        places.append(Place(parameter_of(numel), end + padding, numel))
        end += padding + numel
    layouts = [Layout(places, world, rank, alignment) for rank in range(world)]
    check(layouts)
    assert layouts[0].partition_numel % alignment == 0
    assert end <= world * layouts[0].partition_numel < end + world * alignment
    assert [layout.first for layout in layouts] == [rank * layouts[0].partition_numel for rank in range(world)]
    for piece in layouts[0].pieces:
        assert piece.first == layouts[piece.owner].first + piece.offset
