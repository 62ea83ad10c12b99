# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A native reducer without an engine."""

import itertools

import torch

from deepspeed.compile.zero_1_and_2.layout import Layout, Place


def register(reducer, process_group, parameters, flat=False, dtypes=None):
    """Registers parameters that lie one after the other; returns the elements of a partition.

    ``flat``: as for ``add_group()``. ``dtypes``: those in which gradients are sent, if not all are fp32.
    """
    firsts = itertools.accumulate((parameter.numel() for parameter in parameters), initial=0)
    places = [Place(parameter, first, parameter.numel()) for parameter, first in zip(parameters, firsts)]
    world, on = process_group.size(), parameters[0].device
    layout = Layout(places, world, process_group.rank(), alignment=1)
    group = reducer.add_group(process_group, world, layout.partition_numel, torch.float32, on, flat, None)
    for index, (pieces, dtype) in enumerate(
        zip(layout.by_parameter().values(), dtypes or itertools.repeat(torch.float32))
    ):
        numbers = [piece.numbers for piece in pieces]
        reducer.register_parameter(group, f"parameter {index}", pieces[0].parameter, dtype, numbers)
    return layout.partition_numel
