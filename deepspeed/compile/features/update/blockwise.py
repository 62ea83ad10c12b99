# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer states in 8 bits: the format of a partition's states, and conversions from and to fp32 states.

A state of Adam, such as ``exp_avg``, is kept as two tensors of the optimizer's state of the master weights:

- ``exp_avg_codes``, uint8 [blocks, BLOCK];
- ``exp_avg_scales``, fp32 [blocks].

A partition has whole blocks, because shards have. A block's elements are neighbours in one parameter, from a multiple
of BLOCK on: so blocks do not depend on the number of ranks. ``saved_blocks.py`` has the form of a checkpoint.
"""

from typing import Any, Dict, Tuple

import torch

from .dynamic_map import BLOCK, Map, decode, encode, make_map, zero_code

# Names of the states -> whether they have a sign.
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
# The key of the form of 8-bit states in a checkpoint, and that of the elements of its blocks.
FORM, LENGTHS = "blockwise", "blockwise_lengths"
VERSION = 2
OTHER_PARTITION = (
    "8-bit optimizer states were loaded that belong to another partition of the parameters; load them with the number "
    "of ranks and the settings with which they were saved"
)
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


def map_of(state: str, like: torch.Tensor) -> Map:
    """Returns the map of a state, on the device of ``like``."""
    return make_map(SIGNED[state], like.device)


def zeros(like: torch.Tensor) -> Dict[str, torch.Tensor]:
    """Returns the codes and scales before the first step of a partition with as many elements as ``like``."""
    blocks, states = like.numel() // BLOCK, {}
    for state, signed in SIGNED.items():
        codes, scales = names_of(state)
        states[codes] = torch.full((blocks, BLOCK), zero_code(signed), dtype=torch.uint8, device=like.device)
        states[scales] = torch.zeros(blocks, dtype=torch.float32, device=like.device)
    return states


def to_blocks(states: Dict[str, Any], like: torch.Tensor) -> None:
    """Converts states in fp32, or codes as the optimizer's own load_state_dict() has left them, in place.

    Raises:
        ValueError: if they are not those of a partition with as many elements as ``like``.
    """
    if SIGNED.keys() <= states.keys():
        new = zeros(like)
        for state in SIGNED:
            _encode(state, states.pop(state), *(new[name] for name in names_of(state)))
        states.update(new)
    for state in SIGNED:
        codes, scales = names_of(state)
        if states[codes].numel() != like.numel() or states[scales].numel() * BLOCK != like.numel():
            raise ValueError(OTHER_PARTITION)
        # The load has made fp32 of codes, which are whole numbers, and moves them to the device at most.
        states[codes] = states[codes].to(like.device, torch.uint8)
        states[scales] = states[scales].to(like.device)


def _encode(state, values, codes, scales):
    """Writes the codes and scales of a state's values, 1-D."""
    thresholds = map_of(state, codes).thresholds
    for first in range(0, len(scales), _CONVERTED):
        rows = slice(first, min(first + _CONVERTED, len(scales)))
        part = values[rows.start * BLOCK : rows.stop * BLOCK].to(codes.device).view(-1, BLOCK)
        codes[rows], scales[rows] = encode(part, thresholds)


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


def to_fp32(states: Dict[str, Any], like: torch.Tensor) -> None:
    """Converts 8-bit states in place to fp32 states, for the optimizer itself. Rounded values stay rounded.

    Codes may be as the optimizer's own load_state_dict() has left them. Raises what :func:`to_blocks` raises.
    """
    to_blocks(states, like)
    for state in SIGNED:
        values = fp32_values(states, state, 0, like.numel())
        for name in names_of(state):
            del states[name]
        states[state] = values


def form() -> Dict[str, int]:
    """Returns the description of 8-bit states in a checkpoint.

    All values are numbers, because torch's load cannot pass on text.
    """
    return {"version": VERSION, "elements of a block": BLOCK}
