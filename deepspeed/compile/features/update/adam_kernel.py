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

import bisect
import contextlib
from typing import List, NamedTuple, Sequence, Tuple

import torch
import triton
import triton.language as tl

from ...zero_1_and_2.parameter.runs import Runs as Partition
from ...zero_1_and_2.parameter.runs import in_one_run
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
    """Elements of a partition whose gradients, and whose new values, lie one after the other, in units of 16 elements.

    ``offset`` is where the run begins in the partition: a multiple of 256 elements with 8-bit states. Gradients may
    have fewer elements: those behind are 0. Both addresses are multiples of 16 bytes.
    """

    offset: int
    units: int
    units_of_gradient: int
    gradient: int  # an address
    new: int  # an address


class Runs(NamedTuple):
    """Runs in ascending order, and what is to be known of all of them."""

    runs: List[Run]
    gradient: torch.dtype
    new: torch.dtype
    kept: List[torch.Tensor]  # copies of gradients, which the table refers to


class Table(NamedTuple):
    """What the kernel reads of each run, on its device.

    Attributes:
        entries: int64 [6, runs]. The rows: a run's first program, and the fields of :class:`Run`.
        offsets: of the runs, in elements.
        programs: the first program of each run, and the number of all.
    """

    entries: torch.Tensor
    offsets: List[int]
    programs: List[int]
    runs: Runs


def runs_of(gradients: Sequence[Tuple[int, torch.Tensor]], new: Partition) -> Runs:
    """Lists the runs of a partition.

    Args:
        gradients: (offset in the partition, 1-D gradient) in ascending order, of one dtype.
        new: where new parameters are written.

    Returns:
        the runs, together the whole partition: padding is stepped too, by gradients of 0.
    """
    found, kept = [], []
    if not gradients or gradients[0][0]:
        gradients = [(0, new.memory.new_empty(0, dtype=gradients[0][1].dtype if gradients else None)), *gradients]
    dtype = gradients[0][1].dtype
    size, size_of_new, base = dtype.itemsize, new.dtype.itemsize, new.memory.data_ptr()
    ends = [*(offset for offset, _ in gradients[1:]), new.numel]
    for (offset, gradient), end in zip(gradients, ends, strict=True):
        address, count = gradient.data_ptr(), gradient.numel()
        for begin, place, numel in new.between(offset, end):
            there = max(min(offset + count - begin, numel), 0)
            source = address + (begin - offset) * size if there else 0
            if there % _UNIT or source % 16:
                # As many zeros behind it as fill its last unit, in memory that the kernel can read.
                kept.append(torch.nn.functional.pad(gradient[begin - offset :][:there], (0, -there % _UNIT)).clone())
                source = kept[-1].data_ptr()
            units = numel // _UNIT
            of_gradient = min(-(-there // _UNIT), units)
            found.append(Run(begin // _UNIT, units, of_gradient, source, base + place * size_of_new))
    return Runs(found, dtype, new.dtype, kept)


def tabulate(runs: Runs, has_scales: bool, device: torch.device) -> Table:
    """Returns the table of runs. The host does not wait. ``has_scales``: whether states are in 8 bits."""
    numel_of_program = _blocks(has_scales) * BLOCK
    programs = [0]
    for run in runs.runs:
        programs.append(programs[-1] + triton.cdiv(run.units * _UNIT, numel_of_program))
    columns = (programs[:-1], *zip(*runs.runs, strict=True)) if runs.runs else ()
    entries = torch.tensor([entry for column in columns for entry in column], dtype=torch.int64)
    if device.type == "cuda":
        # From other memory the host would wait for the copy.
        entries = entries.pin_memory()
    offsets = [run.offset * _UNIT for run in runs.runs]
    return Table(entries.to(device, non_blocking=True), offsets, programs, runs)


def step_rows(elements: Elements, settings: Settings) -> None:
    """Steps rows on a GPU: changes all of ``elements`` but the gradient."""
    gradient, new, master = (tensor.view(-1) for tensor in (elements.gradient, elements.new, elements.master))
    table = tabulate(runs_of([(0, gradient)], in_one_run(new)), bool(elements.scales), master.device)
    step_runs(table, 0, master.numel(), master, settings, elements.states, elements.scales)


def step_runs(
    table: Table,
    first: int,
    limit: int,
    master: torch.Tensor,
    settings: Settings,
    states: Tuple[torch.Tensor, ...],
    scales: Tuple[torch.Tensor, ...] = (),
) -> None:
    """Steps the runs in [first, limit) of a partition with one launch.

    Changes their new parameters, and the master weights and states of these elements.

    Args:
        first, limit: in elements. They cut no run.
        master, states, scales: of the whole partition, contiguous, as in ``Elements``.
    """
    begin, end = (bisect.bisect_left(table.offsets, border) for border in (first, limit))
    programs = table.programs[end] - table.programs[begin]
    if not programs:
        return
    mean, mean_sq, most_sq = [*states, None][:3]
    scale, scale_sq = scales or (None, None)
    (values, thresholds), (values_sq, thresholds_sq) = settings.maps or 2 * ((None, None),)
    with torch.cuda.device_of(master) if master.is_cuda else contextlib.nullcontext():
        _step[(programs,)](
            *(table.entries, len(table.offsets), table.programs[begin]),
            *(master, mean, mean_sq, most_sq, scale, scale_sq),
            *(values, thresholds, values_sq, thresholds_sq, settings.scalars),
            GRADIENT=_OF_TRITON[table.runs.gradient],
            NEW=_OF_TRITON[table.runs.new],
            BLOCKS=_blocks(bool(scales)),
            num_warps=_WARPS,
        )


def _blocks(has_scales):
    return _BLOCKS_IN_8_BITS if has_scales else _BLOCKS_IN_FP32


# Triton would compile a kernel for each value or alignment that it specializes on. Ranges have any number of runs.
@triton.jit(do_not_specialize=["count", "first"])
def _step(
    table,
    count,
    first,
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
    program = tl.program_id(0).to(tl.int64) + first
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
    # Number the blocks of the partition. A run of states in 8 bits has whole blocks.
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
