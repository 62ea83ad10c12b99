# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie in the flat tensors of a ZeRO-1/2 optimizer."""


def flat_layout(optimizer, group):
    """Yields (parameter, offset in elements) of a parameter group's flat tensor, in its order."""
    return zip(optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets[group])


def registered_parameters(optimizer):
    """Lists the parameters of every group in the order in which a reducer numbers them."""
    groups = range(len(optimizer.bit16_groups))
    return [parameter for group in groups for parameter, _ in flat_layout(optimizer, group)]
