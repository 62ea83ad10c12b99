# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A native reducer without an engine."""

import itertools

import torch

from deepspeed.compile.zero_1_and_2.layout import Layout


def register(reducer, process_group, parameters, flat=False, dtypes=None):
    """Registers parameters that lie one after the other; returns the elements of a partition.

    ``flat``: as for ``add_group()``. ``dtypes``: those in which gradients are sent, if not all are fp32.
    """
    world, on = process_group.size(), parameters[0].device
    layout = Layout([(parameter, parameter.numel()) for parameter in parameters], world, process_group.rank())
    group = reducer.add_group(process_group, world, layout.partition_numel, torch.float32, on, flat, None)
    for index, (place, dtype) in enumerate(zip(layout.places, dtypes or itertools.repeat(torch.float32))):
        name = f"parameter {index}"
        reducer.register_parameter(group, name, place.parameter, dtype, place.shard, place.offset)
    return layout.partition_numel
