# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Adam over whole blocks of 8-bit states, operator by operator, and what a step of it is given."""

from typing import List, NamedTuple, Optional

import torch

from .dynamic_map import Map, decode, encode


class Blocks(NamedTuple):
    """Whole blocks of a partition. Tensors but scales are [blocks, BLOCK]."""

    gradient: torch.Tensor  # in any dtype
    master: torch.Tensor  # fp32
    new: torch.Tensor  # the memory for the new parameters
    codes: List[torch.Tensor]  # of exp_avg and exp_avg_sq, uint8
    scales: List[torch.Tensor]  # of the same, fp32 [blocks]


class Scalars(NamedTuple):
    """What one step of a parameter group has for all elements, as numbers or as entries of an fp32 tensor."""

    decay: float  # rate * weight_decay if weight decay is decoupled, else weight_decay
    weight: float  # 1 - beta1
    weight_sq: float  # 1 - beta2
    rate: float
    correction: float  # 1 - beta1**step
    root_of_correction_sq: float  # (1 - beta2**step)**0.5
    epsilon: float


class Settings(NamedTuple):
    """What one step of a parameter group has for all elements."""

    decoupled: bool  # whether weight decay is AdamW's
    maximize: bool  # whether to go up the gradient
    factor: Optional[torch.Tensor]  # fp32 [1], by which to multiply gradients, or None
    scalars: torch.Tensor  # fp32, in the order of Scalars
    maps: List[Map]  # of exp_avg and of exp_avg_sq


def step_blocks(blocks: Blocks, settings: Settings) -> None:
    """Steps blocks: changes all of ``blocks`` but the gradient.

    The arithmetic is torchao's, in its order, so that codes have the bits of torchao's optimizer on the same device.
    """
    s = Scalars(*settings.scalars.unbind())
    gradient = blocks.gradient.to(torch.float32)
    if settings.factor is not None:
        gradient = gradient * settings.factor
    if settings.maximize:
        gradient = -gradient
    weights = blocks.master
    if settings.decoupled:
        weights = weights - s.decay * weights
    else:
        gradient = gradient + s.decay * weights
    mean, mean_sq = map(decode, blocks.codes, blocks.scales, (each.values for each in settings.maps))
    mean = mean + s.weight * (gradient - mean)
    mean_sq = mean_sq + s.weight_sq * (gradient * gradient - mean_sq)
    weights = weights - s.rate * (mean / s.correction) / (mean_sq.sqrt() / s.root_of_correction_sq + s.epsilon)
    blocks.master.copy_(weights)
    blocks.new.copy_(weights)
    for state, values in enumerate((mean, mean_sq)):
        codes, scales = encode(values, settings.maps[state].thresholds, signed=state == 0)
        blocks.codes[state].copy_(codes)
        blocks.scales[state].copy_(scales)
