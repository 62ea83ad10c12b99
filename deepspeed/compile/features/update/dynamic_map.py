# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The dynamic 8-bit maps of optimizer states, and blocks of values in 8 bits.

The maps are those of bitsandbytes and torchao (https://arxiv.org/abs/1511.04561, https://arxiv.org/abs/2110.02861).
A code stands for a value from -1 to 1, or from 0 to 1: zero, one, or a value in one of seven decades from 1e-7 on.
Each decade has twice as many codes as the decade below. A block of ``BLOCK`` values has a scale, its largest
magnitude.

In the unsigned map, a nonzero value never becomes zero. Adam divides by the root of the second moment: if that became
zero before the first moment did, a small gradient would move a weight by thousands of learning rates.

Quantization finds the code of the nearest value. Torch's operators search for it in a table. In a kernel, each of the
eight steps of a search would wait for the step before. But the index of a code among those of its sign, as a function
of the magnitude, is linear in each decade, and its slope falls from decade to decade: in a decade that ends at P and
has n codes, it is n * (1 + (x / P - 0.1) / 0.9), less 1 if there is no sign. Such a function is the least of its
lines, so seven products find the index, or the index before. One comparison with a threshold decides which, so that
no rounding changes the code.
"""

import functools
from typing import NamedTuple, Tuple

import torch

# Elements that share a scale.
BLOCK = 256
# The least scale, whose inverse is finite. A larger least scale, such as torchao's 1e-12, would round the second
# moments of small gradients up, and Adam would hardly move their weights.
LEAST_SCALE = torch.finfo(torch.float32).tiny
_DECADES = 7
# For the kernel. Added to a number, this makes quarters the last bits of the sum. So the sum and the added number are
# each rounded by up to an eighth.
TO_QUARTERS = 2**21
# The line minus 0.2 to 1 gives the index or one less: 0.2, because the midpoint between the codes of two decades lies
# up to so much behind an integer. This value leaves room for both roundings.
MARGIN = 0.6


class Map(NamedTuple):
    """A map from codes to values. Both tensors are fp32, on one device."""

    values: torch.Tensor  # [256], ascending
    thresholds: torch.Tensor  # [257]; the code is at least i if the value is at least thresholds[i]


@functools.cache
def make_map(signed: bool, device: torch.device) -> Map:
    """Returns the map of values from -1 to 1 if ``signed``, else from 0 to 1."""
    # Graphs cannot use inference tensors, and the caller may have set another default device.
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        positive = []
        for decade in range(_DECADES):
            codes = 2**decade if signed else 2 ** (decade + 1)
            borders = torch.linspace(0.1, 1, codes + 1, dtype=torch.float32)
            positive.append(10.0 ** (decade + 1 - _DECADES) * ((borders[:-1] + borders[1:]) / 2))
        values = torch.cat([*positive, torch.tensor([0, 1], dtype=torch.float32)])
        values = torch.cat([values, *(-value for value in positive if signed)]).sort().values
        thresholds = _thresholds(values)
        if not signed:
            thresholds[1] = torch.finfo(torch.float32).tiny
        return Map(values.to(device), thresholds.to(device))


def zero_code(signed: bool) -> int:
    """Returns the code of zero."""
    return 127 if signed else 0


def _thresholds(values):
    """Returns, for each code and for 256, the least fp32 value that is rounded to this code or to a higher one.

    A value is rounded up if its distance to the lower code is at least half of the difference, all in fp32.
    """
    lower, upper = values[:-1], values[1:]
    below, threshold = lower, upper
    # Halve the span in which the threshold lies, until its ends are neighbours in fp32.
    while True:
        middle = ((below.double() + threshold.double()) / 2).float()
        if ((middle == below) | (middle == threshold)).all():
            break
        rounds_up = middle - lower >= (upper - lower) * 0.5
        below, threshold = torch.where(rounds_up, below, middle), torch.where(rounds_up, middle, threshold)
    # Every value has code 0 at least, and none has 256.
    ends = torch.tensor([-torch.inf, torch.inf], dtype=torch.float32)
    return torch.cat([ends[:1], threshold, ends[1:]])


def codes_of(values: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Returns the codes of values from -1 to 1 or from 0 to 1: uint8, of the same shape.

    Args:
        values: fp32. NaN has some code.
        thresholds: those of the :class:`Map`.
    """
    return torch.searchsorted(thresholds[1:-1], values, right=True, out_int32=True).to(torch.uint8)


def encode(blocks: torch.Tensor, thresholds: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes, uint8, and the scales, fp32 [blocks], of values: fp32 [blocks, BLOCK]."""
    scales = blocks.abs().amax(-1).clamp(min=LEAST_SCALE)
    return codes_of(blocks / scales.unsqueeze(-1), thresholds), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the values, fp32 [blocks, BLOCK], of codes and scales. ``values`` are those of the :class:`Map`."""
    return _lookup(values, codes) * scales.unsqueeze(-1)


def _lookup(table, index):
    """Returns the entries of a table at valid indices. A checked lookup would compare each index with bounds."""
    return torch.ops.aten._unsafe_index(table, [index.to(torch.int32)])
