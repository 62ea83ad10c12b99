# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Adam over runs of elements as one Triton kernel. Computes :func:`.adam_operators.step_rows`.

A partition's gradients and new parameters lie in hundreds of places, one for each shard. One launch steps all of them:
each program finds its run in a table. A launch for each shard would keep the device waiting for the host.

Formats are constants of the kernel: the dtypes of gradients and new parameters, master weights in fp32 or as their
remainders (``remainders.py``), and states in fp32 or in 8 bits. With 8 bits, Inductor's kernel takes twice as long as
its memory traffic: it keeps the maps' tables in global memory, and gives one block to few threads. This kernel keeps
the tables in registers and shared memory (``tl.gather``). It multiplies by 1 / scale, so ties may round differently
than with torch's operators.
"""

import contextlib
from typing import NamedTuple, Sequence, Tuple

import torch
import triton
import triton.language as tl

from .adam_operators import Elements, Settings
from .dynamic_map import BLOCK, LEAST_SCALE, MARGIN, TO_QUARTERS

# Blocks of one program, and warps: with 8 bits the fastest on an H200 among 1 to 8 blocks and 1 to 8 warps.
_BLOCKS_IN_FP32, _BLOCKS_IN_8_BITS, _WARPS = 4, 8, 4
_BLOCK, _LEAST_SCALE = tl.constexpr(BLOCK), tl.constexpr(LEAST_SCALE)
_IN_UNIT = tl.constexpr(16)
_MARGIN, _TO_QUARTERS = tl.constexpr(MARGIN), tl.constexpr(TO_QUARTERS)


# Elements of a run are counted in units, so that Triton knows that it may read and write 16 bytes at a time.
_UNIT = 16
_OF_TRITON = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class Run(NamedTuple):
    """Elements of a partition whose gradients, and whose new values, lie one after the other.

    ``offset`` is where the run begins in the partition, in elements: a multiple of 16, and of 256 with 8-bit states.
    ``gradient`` may be shorter than ``new``, 1-D both: behind its end gradients are 0, and behind the last whole 16
    elements of ``new`` nothing is stepped. Both begin at a multiple of 16 bytes.
    """

    offset: int
    gradient: torch.Tensor
    new: torch.Tensor


def step_rows(elements: Elements, settings: Settings) -> None:
    """Steps rows on a GPU: changes all of ``elements`` but the gradient."""
    flat = [tensor.view(-1) for tensor in (elements.gradient, elements.new)]
    step_runs([(0, *flat)], elements.master.view(-1), settings, elements.states, elements.scales)


def step_runs(
    runs: Sequence[Tuple[int, torch.Tensor, torch.Tensor]],
    master: torch.Tensor,
    settings: Settings,
    states: Tuple[torch.Tensor, ...],
    scales: Tuple[torch.Tensor, ...] = (),
) -> None:
    """Steps runs of a partition on a GPU: changes the new parameters, and master weights and states of these elements.

    Args:
        runs: the fields of :class:`Run`. All gradients have one dtype, and all new parameters have one.
        master, states, scales: of the whole partition, contiguous, as in ``Elements``.
    """
    if not runs:
        return
    mean, mean_sq, most_sq = [*states, None][:3]
    scale, scale_sq = scales or (None, None)
    (values, thresholds), (values_sq, thresholds_sq) = settings.maps or 2 * ((None, None),)
    blocks = _BLOCKS_IN_8_BITS if scales else _BLOCKS_IN_FP32
    with torch.cuda.device_of(master) if master.is_cuda else contextlib.nullcontext():
        # Keep these until the kernel is queued: a padded gradient is a copy.
        whole = [Run(offset, _in_units(gradient), new) for offset, gradient, new in runs]
        table, programs = _table(whole, blocks * BLOCK, master.device)
        _step[(programs,)](
            *(table, len(runs), master, mean, mean_sq, most_sq, scale, scale_sq),
            *(values, thresholds, values_sq, thresholds_sq, settings.scalars),
            GRADIENT=_OF_TRITON[whole[0].gradient.dtype],
            NEW=_OF_TRITON[whole[0].new.dtype],
            BLOCKS=blocks,
            num_warps=_WARPS,
        )


def _in_units(gradient):
    """Returns a gradient with as many zeros behind it as fill its last unit, in memory that the kernel can read."""
    lacking = -gradient.numel() % _UNIT
    if lacking or gradient.data_ptr() % 16:
        return torch.nn.functional.pad(gradient, (0, lacking)).clone()
    return gradient


def _table(runs, numel_of_program, device):
    """Returns what the kernel reads of each run, int64 [6, runs], and the number of programs.

    The rows: its first program, its offset, its elements and those of its gradient in units, and the addresses of
    gradient and new parameters.
    """
    rows, programs = [], 0
    for offset, gradient, new in runs:
        units = new.numel() // _UNIT
        rows.append((programs, offset // _UNIT, units, min(gradient.numel() // _UNIT, units)))
        programs += triton.cdiv(units * _UNIT, numel_of_program)
    addresses = [(run.gradient.data_ptr(), run.new.data_ptr()) for run in runs]
    entries = torch.tensor([[*row, *places] for row, places in zip(rows, addresses, strict=True)], dtype=torch.int64)
    entries = entries.t().contiguous()
    # From pinned memory, so that the host does not wait for the copy.
    return (entries.pin_memory() if device.type == "cuda" else entries).to(device, non_blocking=True), programs


# Triton would compile a kernel for each value or alignment that it specializes on. Ranges have any number of runs.
@triton.jit(do_not_specialize=["count"])
def _step(
    table,
    count,
    masters,
    means,
    means_sq,
    mosts_sq,  # None: without amsgrad
    scales,  # None: states are in fp32, and there are no tables
    scales_sq,
    values,
    thresholds,
    values_sq,
    thresholds_sq,
    scalars,
    GRADIENT: tl.constexpr,
    NEW: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    # The last run whose first program is not behind this one.
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(table + middle) <= program:
            low = middle
        else:
            high = middle
    offset = tl.load(table + count + low) * _IN_UNIT
    numel, numel_of_gradient = tl.load(table + 2 * count + low), tl.load(table + 3 * count + low)
    gradients = tl.load(table + 4 * count + low).to(tl.pointer_type(GRADIENT))
    news = tl.load(table + 5 * count + low).to(tl.pointer_type(NEW))
    gradients, news = tl.multiple_of(gradients, 16), tl.multiple_of(news, 16)

    own_blocks = (program - tl.load(table + low)) * BLOCKS + tl.arange(0, BLOCKS)
    inside = own_blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    places = inside + offset
    there = inside < numel * _IN_UNIT
    # Of the partition. A run of states in 8 bits has whole blocks.
    blocks = own_blocks + offset // _BLOCK
    count_of_blocks = (offset + numel * _IN_UNIT) // _BLOCK

    factor, decay_of_gradient, decay = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    weight, weight_sq = tl.load(scalars + 3), tl.load(scalars + 4)
    rate, epsilon = tl.load(scalars + 5) / tl.load(scalars + 6), tl.load(scalars + 8)
    inverse_root = 1.0 / tl.load(scalars + 7)

    has_gradient = inside < numel_of_gradient * _IN_UNIT
    gradient = tl.load(gradients + inside, mask=has_gradient, other=0.0).to(tl.float32) * factor
    if masters.dtype.element_ty == tl.int16:
        master = _join(tl.load(news + inside, mask=there, other=0.0), tl.load(masters + places, mask=there, other=0))
    else:
        master = tl.load(masters + places, mask=there, other=0.0)
    # Each sum with a product is one operation, rounded once, so that formats do not change numbers. In a sum of two
    # products the compiler could round either product first.
    gradient = tl.fma(decay_of_gradient, master, gradient)
    master = tl.fma(-decay, master, master)
    if scales is None:
        mean = tl.load(means + places, mask=there, other=0.0)
        mean_sq = tl.load(means_sq + places, mask=there, other=0.0)
    else:
        mean = _decode(means, scales, values, places, there, blocks, count_of_blocks, BLOCKS)
        mean_sq = _decode(means_sq, scales_sq, values_sq, places, there, blocks, count_of_blocks, BLOCKS)
    mean = tl.fma(weight, gradient - mean, mean)
    mean_sq = tl.fma(weight_sq, tl.fma(gradient, gradient, -mean_sq), mean_sq)
    divisor = mean_sq
    if mosts_sq is not None:
        most_sq = tl.load(mosts_sq + places, mask=there, other=0.0)
        divisor = tl.maximum(most_sq, mean_sq, propagate_nan=tl.PropagateNan.ALL)
        tl.store(mosts_sq + places, divisor, mask=there)
    master = master - rate * mean / tl.fma(tl.sqrt(divisor), inverse_root, epsilon)
    if masters.dtype.element_ty == tl.int16:
        new, master = _split(master)
    else:
        new = master.to(NEW)
    tl.store(masters + places, master, mask=there)
    tl.store(news + inside, new, mask=there)
    if scales is None:
        tl.store(means + places, mean, mask=there)
        tl.store(means_sq + places, mean_sq, mask=there)
    else:
        entries = tl.arange(0, 256)
        mean = _scaled(mean, tl.max(tl.abs(mean), 1), scales, blocks, count_of_blocks)
        mean_sq = _scaled(mean_sq, tl.max(mean_sq, 1), scales_sq, blocks, count_of_blocks)
        # 127 + the index, or 126 - the index where the sign bit is set.
        lower = 127 + ((_index(tl.abs(mean), 1, 0) & 127) ^ (mean.to(tl.int32, bitcast=True) >> 31))
        lower_sq = _index(mean_sq, 2, 1) & 255
        # Signed values begin at -1, so the tables begin at different entries.
        above = mean >= _look_up(tl.load(thresholds + entries), lower + 1, BLOCKS)
        above_sq = mean_sq >= _look_up(tl.load(thresholds_sq + 1 + entries), lower_sq, BLOCKS)
        tl.store(means + places, (lower + above.to(tl.int32)).to(tl.uint8), mask=there)
        tl.store(means_sq + places, (lower_sq + above_sq.to(tl.int32)).to(tl.uint8), mask=there)


@triton.jit
def _join(parameter, remainder):
    """Computes :func:`.remainders.join`."""
    parameter, remainder = parameter.to(tl.int16, bitcast=True).to(tl.int32), remainder.to(tl.int32)
    magnitude = parameter & 0x7FFF
    is_changed = ((magnitude == 0) & (remainder < 0)) | ((magnitude == 0x7F80) & (remainder > 0))
    return ((parameter << 16) + tl.where(is_changed, 0, remainder)).to(tl.float32, bitcast=True)


@triton.jit
def _split(master):
    """Computes :func:`.remainders.split`."""
    bits = master.to(tl.int32, bitcast=True)
    parameter = tl.where(master == master, (bits + 0x8000) >> 16, 0x7FC0)
    remainder = tl.where(master == master, bits - (parameter << 16), 0)
    return parameter.to(tl.int16).to(tl.bfloat16, bitcast=True), remainder.to(tl.int16)


@triton.jit
def _decode(codes, scales, values, places, there, blocks, count, BLOCKS: tl.constexpr):
    """Returns the values of codes, [BLOCKS, BLOCK]."""
    index = tl.load(codes + places, mask=there, other=0).to(tl.int32)
    scale = tl.load(scales + blocks, mask=blocks < count, other=0.0)
    return _look_up(tl.load(values + tl.arange(0, 256)), index, BLOCKS) * scale[:, None]


@triton.jit
def _scaled(state, magnitude, scales, blocks, count):
    """Stores the scales of blocks whose largest magnitude is ``magnitude``. Returns values divided by the scale."""
    scale = tl.maximum(magnitude, _LEAST_SCALE)
    tl.store(scales + blocks, scale, mask=blocks < count)
    return state * (1.0 / scale)[:, None]


@triton.jit
def _look_up(table, index, BLOCKS: tl.constexpr):
    """Returns the entries of a table [256] at indices [BLOCKS, BLOCK]."""
    return tl.reshape(tl.gather(table, tl.reshape(index, [BLOCKS * _BLOCK]), 0), [BLOCKS, _BLOCK])


@triton.jit
def _index(magnitude, FIRST: tl.constexpr, LESS: tl.constexpr):
    """Returns the index of a code, or the index before: the least of the lines of ``dynamic_map.py``.

    Args:
        FIRST: codes in the lowest decade.
        LESS: subtracted from all indices.
    """
    OFFSET: tl.constexpr = _TO_QUARTERS - _MARGIN - LESS
    found = (magnitude * (FIRST / 0.9e-6) + (FIRST * 8 / 9 + OFFSET)).to(tl.int32, bitcast=True)
    for decade in tl.static_range(1, 7):
        line = magnitude * (FIRST * 2**decade / (0.9 * 10.0 ** (decade - 6))) + (FIRST * 2**decade * 8 / 9 + OFFSET)
        found = tl.minimum(found, line.to(tl.int32, bitcast=True))
    return found >> 2
