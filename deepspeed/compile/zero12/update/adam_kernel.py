# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Adam over whole blocks of 8-bit states as one kernel, in Triton: what :func:`.adam_of_blocks.step_blocks` does.

Inductor's kernel of the same step takes twice the time of the memory that it moves: it keeps the maps' tables in
global memory, and gives one block to few threads. This kernel takes 1.21 times that time on an H200. It keeps the
tables in registers and shared memory (``tl.gather``), and multiplies by 1 / scale: what lies in the middle of two
codes may be rounded otherwise than by torch's operators.
"""

import torch
import triton
import triton.language as tl

from .adam_of_blocks import Blocks, Settings
from .dynamic_map import BLOCK, LEAST_SCALE, MARGIN, TO_QUARTERS

# The fastest on an H200, of 1 to 8 blocks and 1 to 8 warps.
_ROWS, _WARPS = 8, 4
_BLOCK, _LEAST_SCALE = tl.constexpr(BLOCK), tl.constexpr(LEAST_SCALE)
_MARGIN, _TO_QUARTERS = tl.constexpr(MARGIN), tl.constexpr(TO_QUARTERS)


def step_blocks(blocks: Blocks, settings: Settings) -> None:
    """Steps blocks on a GPU: changes all of ``blocks`` but the gradient."""
    rows = blocks.master.shape[0]
    (codes, codes_sq), (scales, scales_sq) = blocks.codes, blocks.scales
    (values, thresholds), (values_sq, thresholds_sq) = settings.maps
    with torch.cuda.device(blocks.master.device):
        _step[(triton.cdiv(rows, _ROWS),)](
            *(blocks.gradient, settings.factor, blocks.master, blocks.new, codes, codes_sq, scales, scales_sq),
            *(values, thresholds, values_sq, thresholds_sq, settings.scalars, rows),
            DECOUPLED=settings.decoupled,
            MAXIMIZE=settings.maximize,
            ROWS=_ROWS,
            num_warps=_WARPS,
        )


# Of each value or alignment that it specializes, Triton makes another kernel. Ranges have any count of blocks, and
# begin at any scale.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["scales", "scales_sq"])
def _step(
    gradients,
    factor,  # None: gradients are not scaled
    masters,
    news,
    codes,
    codes_sq,
    scales,
    scales_sq,
    values,
    thresholds,
    values_sq,
    thresholds_sq,
    scalars,
    count,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    there, all_there = rows < count, (rows < count)[:, None]

    decay, weight, weight_sq = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    rate, epsilon = tl.load(scalars + 3) / tl.load(scalars + 4), tl.load(scalars + 6)
    of_root = 1.0 / tl.load(scalars + 5)

    gradient = tl.load(gradients + places, mask=all_there, other=0.0).to(tl.float32)
    master = tl.load(masters + places, mask=all_there, other=0.0)
    if factor is not None:
        gradient = gradient * tl.load(factor)
    if MAXIMIZE:
        gradient = -gradient
    if DECOUPLED:
        master = master - decay * master
    else:
        gradient = gradient + decay * master

    index, index_sq = tl.load(codes + places, mask=all_there), tl.load(codes_sq + places, mask=all_there)
    scale, scale_sq = tl.load(scales + rows, mask=there), tl.load(scales_sq + rows, mask=there)
    entries = tl.arange(0, 256)
    mean = _look_up(tl.load(values + entries), index.to(tl.int32), ROWS) * scale[:, None]
    mean_sq = _look_up(tl.load(values_sq + entries), index_sq.to(tl.int32), ROWS) * scale_sq[:, None]
    mean = mean + weight * (gradient - mean)
    mean_sq = mean_sq + weight_sq * (gradient * gradient - mean_sq)
    master = master - rate * mean / (tl.sqrt(mean_sq) * of_root + epsilon)
    tl.store(masters + places, master, mask=all_there)
    tl.store(news + places, master.to(news.dtype.element_ty), mask=all_there)

    scale = tl.maximum(tl.max(tl.abs(mean), 1), _LEAST_SCALE)
    scale_sq = tl.maximum(tl.max(mean_sq, 1), _LEAST_SCALE)
    tl.store(scales + rows, scale, mask=there)
    tl.store(scales_sq + rows, scale_sq, mask=there)
    mean, mean_sq = mean * (1.0 / scale)[:, None], mean_sq * (1.0 / scale_sq)[:, None]
    # 127 + the index, or 126 - the index where the sign bit is set.
    lower = 127 + ((_index(tl.abs(mean), 1, 0) & 127) ^ (mean.to(tl.int32, bitcast=True) >> 31))
    lower_sq = _index(mean_sq, 2, 1) & 255
    # From -1 on if there is a sign, so the tables differ in where they begin.
    above = mean >= _look_up(tl.load(thresholds + entries), lower + 1, ROWS)
    above_sq = mean_sq >= _look_up(tl.load(thresholds_sq + 1 + entries), lower_sq, ROWS)
    tl.store(codes + places, (lower + above.to(tl.int32)).to(tl.uint8), mask=all_there)
    tl.store(codes_sq + places, (lower_sq + above_sq.to(tl.int32)).to(tl.uint8), mask=all_there)


@triton.jit
def _look_up(table, index, ROWS: tl.constexpr):
    """Returns the entries of a table [256] at indices [ROWS, BLOCK]."""
    return tl.reshape(tl.gather(table, tl.reshape(index, [ROWS * _BLOCK]), 0), [ROWS, _BLOCK])


@triton.jit
def _index(magnitude, FIRST: tl.constexpr, LESS: tl.constexpr):
    """Returns the index of a code, or the index before: the least of the lines of ``dynamic_map.py``.

    Args:
        FIRST: codes in the lowest decade.
        LESS: what is taken off all indices.
    """
    OFFSET: tl.constexpr = _TO_QUARTERS - _MARGIN - LESS
    found = (magnitude * (FIRST / 0.9e-6) + (FIRST * 8 / 9 + OFFSET)).to(tl.int32, bitcast=True)
    for decade in tl.static_range(1, 7):
        line = magnitude * (FIRST * 2**decade / (0.9 * 10.0 ** (decade - 6))) + (FIRST * 2**decade * 8 / 9 + OFFSET)
        found = tl.minimum(found, line.to(tl.int32, bitcast=True))
    return found >> 2
