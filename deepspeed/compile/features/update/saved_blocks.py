# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""8-bit optimizer states of a partition in a checkpoint, in which the base's order cuts partitions.

A checkpoint has the codes of the elements in that order, and for each block that lies in the partition, or a part of
it, its scale and the number of its elements there. Padding is in blocks whose scale is zero.

Torch's ``load_state_dict()`` casts every state to the dtype of the parameter, which makes four bytes of each code. So
a checkpoint has the codes' memory as fp32, which no cast changes, and lengths as fp32. Two dimensions tell these
tensors from states in fp32.
"""

from typing import Any, Dict, List, Tuple

import torch

from ..checkpoints.order import BaseOrder
from .blockwise import FORM, LENGTHS, SIGNED, form, names_of
from .dynamic_map import BLOCK, LEAST_SCALE, decode, make_map, zero_code

# Elements of a block of padding at most, and elements that are decoded at once.
_PADDING, _DECODED = 2**20, 2**22


def saved(states: Dict[str, Any], order: BaseOrder) -> Dict[str, Any]:
    """Returns 8-bit states in a checkpoint's form, on the host. All ranks call it."""
    lengths, is_real = _lengths(order)
    entry = {**states, FORM: form(), LENGTHS: lengths.view(-1, 1)}
    for state in SIGNED:
        codes, scales = names_of(state)
        in_base = order.to_base(states[codes].view(-1), "cpu")
        entry[codes] = torch.nn.functional.pad(in_base, (0, -in_base.numel() % 4)).view(torch.float32).view(-1, 1)
        all_scales = torch.zeros(len(lengths), dtype=torch.float32)
        all_scales[is_real] = blocks_to_base(order, states[scales])
        entry[scales] = all_scales.view(-1, 1)
    return entry


def taken(states: Dict[str, Any], order: BaseOrder, device: torch.device) -> None:
    """Does the reverse of :func:`saved`, in place, with the states on a device. All ranks call it."""
    _, is_real = _lengths(order)
    for state, signed in SIGNED.items():
        codes, scales = names_of(state)
        in_base = states[codes].contiguous().view(-1).view(torch.uint8)
        states[codes] = order.to_even(in_base, device, zero_code(signed)).view(-1, BLOCK)
        real = states[scales].view(-1)[is_real.to(states[scales].device)]
        # As a step leaves blocks of zeros.
        states[scales] = blocks_to_even(order, real, device, LEAST_SCALE)
    del states[FORM], states[LENGTHS]


def blocks_to_base(order: BaseOrder, values: torch.Tensor) -> torch.Tensor:
    """Returns values of the blocks in this rank's partition in the base's order, on the host. All ranks call it.

    There a block may lie in two partitions. Both get its value. There are no blocks of padding.

    Args:
        values: of the blocks in this rank's partition in memory, 1-D.
    """
    of_even, of_base = _entries(order)
    result = torch.zeros(sum(count for *_, count in of_base), dtype=values.dtype, device="cpu")
    order.exchange_at_once(values, of_even, result, of_base)
    return result


def blocks_to_even(order: BaseOrder, values: torch.Tensor, device: torch.device, padding: float) -> torch.Tensor:
    """Does the reverse of :func:`blocks_to_base`. ``padding``: the value of blocks of padding."""
    of_even, of_base = _entries(order)
    result = torch.full((order.layout.partition_numel // BLOCK,), padding, dtype=values.dtype, device=device)
    order.exchange_at_once(values, of_base, result, of_even)
    return result


def _entries(order):
    """Returns the entries of the blocks of this rank's partition in memory, and of that in the base's order."""
    of_even, of_base, first = [], [], 0
    for span in order.spans_of_even(order.layout.rank):
        of_even.append((span.base, span.in_base, span.in_even // BLOCK, _blocks(span)))
    for span in order.spans_of_base(order.layout.rank):
        of_base.append((span.even, span.in_base, first, _blocks(span)))
        first += _blocks(span)
    return of_even, of_base


def _blocks(span):
    """Returns how many blocks have elements of a span."""
    return -(-(span.source + span.numel) // BLOCK) - span.source // BLOCK


def to_fp32_in_base_order(states: Dict[str, Any]) -> None:
    """Converts a checkpoint's 8-bit states in place to fp32 states in the same order. Rounded values stay rounded."""
    lengths = states.pop(LENGTHS).view(-1).to("cpu", torch.int64)
    ends = lengths.cumsum(0)
    numel = int(ends[-1]) if len(ends) else 0
    for state, signed in SIGNED.items():
        codes, scales = (states.pop(name) for name in names_of(state))
        codes, scales = codes.contiguous().view(-1).view(torch.uint8)[:numel], scales.view(-1).cpu()
        values = torch.empty(numel, dtype=torch.float32, device=codes.device)
        for first in range(0, numel, _DECODED):
            last = min(first + _DECODED, numel)
            numbers = torch.searchsorted(ends, torch.arange(first, last), right=True)
            of_elements = scales[numbers].to(codes.device)
            table = make_map(signed, codes.device).values
            values[first:last] = decode(codes[first:last].view(-1, 1), of_elements, table).view(-1)
        states[state] = values
    states.pop(FORM, None)


def blocks_of(order: BaseOrder) -> int:
    """Returns how many blocks a checkpoint has of this rank's partition, with those of padding."""
    return len(_lengths(order)[0])


def _lengths(order: BaseOrder) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns the elements of each block in this rank's partition, fp32, and whether it is one of a parameter."""
    lengths: List[torch.Tensor] = [torch.empty(0)]
    are_real: List[torch.Tensor] = [torch.empty(0, dtype=torch.bool)]

    def add(sizes, is_real):
        lengths.append(sizes)
        are_real.append(torch.full(sizes.shape, is_real))

    def pad(numel):
        whole, rest = divmod(numel, _PADDING)
        add(torch.tensor([float(_PADDING)] * whole + [float(rest)] * (rest > 0)), False)

    filled = 0
    for span in order.spans_of_base(order.layout.rank):
        pad(span.in_base - filled)
        inside = span.source % BLOCK
        sizes = torch.full((_blocks(span),), float(BLOCK))
        sizes[-1] -= -(inside + span.numel) % BLOCK
        sizes[0] -= inside
        add(sizes, True)
        filled = span.in_base + span.numel
    pad(order.numel - filled)
    return torch.cat(lengths), torch.cat(are_real)
