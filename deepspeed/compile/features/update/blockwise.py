# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer states in 8 bits: the format of a partition's states, and conversions from and to fp32 states.

A state of Adam, such as ``exp_avg``, is kept as two tensors of the optimizer's state of the master weights:

- ``exp_avg_codes``, uint8 [blocks, BLOCK];
- ``exp_avg_scales``, fp32 [blocks].

Blocks lie on the grid of the parameter group's flat tensor, so that they do not depend on the number of ranks. A
partition may contain only a part of its first and last block. The rest of such a block stays zero.

Torch's ``load_state_dict()`` casts every state to the dtype of the parameter, which makes four bytes of each code. So
a checkpoint has the codes' memory as fp32 [blocks, BLOCK / 4], which no cast changes. If the caller saved the states
of the inner optimizer itself, the codes are cast back after the load.
"""

from typing import Any, Dict, Tuple

import torch

from .dynamic_map import BLOCK, Map, decode, encode, make_map, zero_code

# Names of the states -> whether they have a sign.
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
# The key of the form of 8-bit states in a checkpoint.
FORM = "blockwise"
# Blocks that are converted at once.
_CONVERTED = 2**14


def names_of(state: str) -> Tuple[str, str]:
    """Returns the names of a state's codes and scales."""
    return f"{state}_codes", f"{state}_scales"


def is_blockwise(states: Any) -> bool:
    """Whether an entry of an optimizer's ``state`` has 8-bit states.

    An entry may also be a count or another object that an optimizer keeps there under a name.
    """
    if not isinstance(states, dict):
        return False
    # A load of fp32 states may leave old codes beside them. Then the fp32 states are valid.
    return not any(state in states for state in SIGNED) and all(
        name in states for state in SIGNED for name in names_of(state)
    )


def has_moments(states: Dict[str, Any]) -> bool:
    """Whether an optimizer's states of a partition have Adam's two states, in 8 bits or in fp32."""
    return is_blockwise(states) or SIGNED.keys() <= states.keys()


def count_of_blocks(offset: int, numel: int) -> int:
    """Returns the number of blocks that a partition of ``numel`` elements touches, which begins at ``offset``."""
    return -(-(offset % BLOCK + numel) // BLOCK)


def map_of(state: str, like: torch.Tensor) -> Map:
    """Returns the map of a state, on the device of ``like``."""
    return make_map(SIGNED[state], like.device)


def zeros(offset: int, like: torch.Tensor) -> Dict[str, torch.Tensor]:
    """Returns the codes and scales before the first step of a partition.

    Args:
        offset: offset of the partition in the group's flat tensor, in elements.
    """
    blocks, states = count_of_blocks(offset, like.numel()), {}
    for state, signed in SIGNED.items():
        codes, scales = names_of(state)
        states[codes] = torch.full((blocks, BLOCK), zero_code(signed), dtype=torch.uint8, device=like.device)
        states[scales] = torch.zeros(blocks, dtype=torch.float32, device=like.device)
    return states


def to_blocks(states: Dict[str, Any], offset: int, like: torch.Tensor) -> None:
    """Converts ``states``, which were loaded or made by the optimizer's own step in fp32, to 8-bit states in place.

    The other arguments are those of :func:`zeros`.

    Raises:
        ValueError: as :func:`refuse_other_partitions`.
    """
    refuse_other_partitions(states, offset, like.numel())
    if SIGNED.keys() <= states.keys():
        new = zeros(offset, like)
        for state in SIGNED:
            _encode(state, states.pop(state), offset % BLOCK, *(new[name] for name in names_of(state)))
        states.update(new)
    states.pop(FORM, None)
    blocks = count_of_blocks(offset, like.numel())
    for state in SIGNED:
        codes, scales = names_of(state)
        if states[codes].dtype == torch.float32 and states[codes].numel() == blocks * BLOCK:
            # The optimizer's own load_state_dict() has cast codes that were never saved as fp32: whole numbers.
            states[codes] = states[codes].to(torch.uint8)
        # These lines make views, and move tensors to the device at most.
        states[codes] = states[codes].to(like.device).view(torch.uint8).view(blocks, BLOCK)
        states[scales] = states[scales].to(like.device)


def refuse_other_partitions(states: Dict[str, Any], offset: int, numel: int) -> None:
    """Raises ValueError if 8-bit states are those of another partition, or have another format."""
    _refuse_other_forms(states, offset)
    blocks = count_of_blocks(offset, numel)
    for state in SIGNED if is_blockwise(states) else ():
        codes, scales = (states[name] for name in names_of(state))
        # A load has cast these codes to fp32: see to_blocks().
        width = 1 if codes.dtype == torch.float32 and codes.numel() == blocks * BLOCK else codes.element_size()
        if codes.numel() * width != blocks * BLOCK or scales.numel() != blocks:
            raise ValueError(
                "8-bit optimizer states were loaded that belong to another partition of the parameters; load them "
                "with the number of ranks and the settings with which they were saved"
            )


def _refuse_other_forms(states, offset):
    """Raises ValueError if 8-bit states do not have the form of a partition that begins at ``offset``."""
    form, expected = states.get(FORM), form_of(offset)
    if form is not None and form != expected and is_blockwise(states):
        raise ValueError(
            f"8-bit optimizer states were loaded of the form {form}, where {expected} is needed; load them with the "
            "release of this fork, the number of ranks and the settings with which they were saved"
        )


def _encode(state, values, before, codes, scales):
    """Writes the codes and scales of a state's values, 1-D, which begin ``before`` elements into a block."""
    thresholds = map_of(state, codes).thresholds
    for first in range(0, len(scales), _CONVERTED):
        rows = slice(first, min(first + _CONVERTED, len(scales)))
        begin, end = rows.start * BLOCK - before, rows.stop * BLOCK - before
        part = values[max(begin, 0) : end].to(codes.device)
        missing = max(-begin, 0)
        part = torch.nn.functional.pad(part, (missing, end - begin - missing - part.numel())).view(-1, BLOCK)
        codes[rows], scales[rows] = encode(part, thresholds, SIGNED[state])


def fp32_values(states: Dict[str, Any], state: str, first: int, last: int) -> torch.Tensor:
    """Returns elements [first, last) of a state, fp32 1-D, counted from the beginning of its first block."""
    codes, scales = (states[name] for name in names_of(state))
    codes, table = codes.view(torch.uint8).view(-1, BLOCK), map_of(state, codes).values
    values = scales.new_empty(last - first)
    # Convert some blocks at a time, because a conversion takes three times the memory of its result.
    for begin in range(first, last, _CONVERTED * BLOCK):
        end = min(begin + _CONVERTED * BLOCK, last)
        rows = slice(begin // BLOCK, -(-end // BLOCK))
        decoded = decode(codes[rows], scales[rows], table).view(-1)
        values[begin - first : end - first] = decoded[begin - rows.start * BLOCK : end - rows.start * BLOCK]
    return values


def to_fp32(states: Dict[str, Any], offset: int, numel: int) -> None:
    """Converts 8-bit states in place to fp32 states, for the optimizer itself. Rounded values stay rounded.

    Raises:
        ValueError: if the states belong to another partition, or have another format.
    """
    _refuse_other_forms(states, offset)
    before = offset % BLOCK
    for state in SIGNED:
        values = fp32_values(states, state, before, before + numel)
        for name in names_of(state):
            del states[name]
        states[state] = values
    states.pop(FORM, None)


def form_of(offset: int) -> Dict[str, int]:
    """Returns the description of 8-bit states in a checkpoint, for a partition that begins at ``offset``.

    All values are numbers, because torch's load cannot pass on text.
    """
    return {"version": 1, "elements of a block": BLOCK, "elements before the partition": offset % BLOCK}


def saved(states: Dict[str, Any], offset: int) -> Dict[str, Any]:
    """Returns the 8-bit states of a partition that begins at ``offset`` in a checkpoint's form, without a copy."""
    codes = {name: states[name].view(torch.float32) for name, _ in map(names_of, SIGNED)}
    return {**states, **codes, FORM: form_of(offset)}
