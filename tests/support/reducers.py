# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A native reducer without an engine."""

import itertools
from unittest import mock

import torch

from deepspeed.compile.zero_1_and_2 import layout


def register(reducer, process_group, parameters, flat=False, dtypes=None):
    """Registers parameters; returns how many of their elements this rank's partition has.

    Shards have a multiple of four elements, so that every rank has some of a small parameter, and others padding.

    ``flat``: as for ``add_group()``. ``dtypes``: those in which gradients are sent, if not all are fp32.
    """
    world, on = process_group.size(), parameters[0].device
    with mock.patch.object(layout, "SHARD_MULTIPLE", 4):
        sizes = [(parameter, parameter.numel()) for parameter in parameters]
        cut = layout.Layout(sizes, world, process_group.rank())
    group = reducer.add_group(process_group, world, cut.partition_numel, torch.float32, on, flat, None)
    for index, (place, dtype) in enumerate(zip(cut.places, dtypes or itertools.repeat(torch.float32))):
        name = f"parameter {index}"
        reducer.register_parameter(group, name, place.parameter, dtype, place.shard, place.offset)
    return sum(piece.numel for piece in cut.own_pieces())
