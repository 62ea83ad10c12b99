# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""8-bit optimizer states in DeepSpeed's checkpoints and ``safe_get_full_optimizer_state()``.

A checkpoint has the codes, so an engine that loads it goes on with the same bits. Loaded fp32 states become 8-bit
states. An engine without ``compile.optimizer_states`` that loads 8-bit states goes on with their values in fp32.
"""

import functools
from typing import TYPE_CHECKING, Any, Dict, Iterator, Mapping

import torch

from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, OPTIMIZER_STATE_DICT
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.layout import layouts_of
from ..checkpoints.order import base_orders
from .blockwise import (
    FORM,
    OTHER_PARTITION,
    SIGNED,
    form,
    fp32_values,
    has_moments,
    is_blockwise,
    names_of,
    to_blocks,
    to_fp32,
)
from .saved_blocks import blocks_of, saved, taken, to_fp32_in_base_order

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class StatesOfAdam:
    """The form of an optimizer's states.

    Args:
        in_8_bits: whether the optimizer keeps 8-bit states, instead of fp32 states.
    """

    def __init__(self, in_8_bits: bool):
        self._in_8_bits = in_8_bits

    def as_saved(self, optimizer: DeepSpeedZeroOptimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        """Returns a state dict of the ZeRO-1/2 optimizer with 8-bit states in the form that torch's load keeps."""
        inner = state_dict[BASE_OPTIMIZER_STATE]
        # An elastic checkpoint has a list instead, and no 8-bit states.
        if isinstance(inner, dict):
            # Torch keeps the key of a state that belongs to no parameter.
            states = {
                index: saved(entry, optimizer.base_orders[index]) if is_blockwise(entry) else entry
                for index, entry in inner["state"].items()
            }
            state_dict[BASE_OPTIMIZER_STATE] = {**inner, "state": states}
        return state_dict

    def refuse_others(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Raises ValueError if loaded states cannot be converted to this form."""
        for states, order in _loaded(optimizer):
            _refuse_other_forms_and_partitions(states, order)

    def adopt(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Converts loaded states to the form that the optimizer keeps. All ranks call it."""
        for states, order in _loaded(optimizer):
            _refuse_other_forms_and_partitions(states, order)
            if hasattr(optimizer, "base_orders"):
                taken(states, order, optimizer.single_partition_of_fp32_groups[0].device)
            else:
                to_fp32_in_base_order(states)
        for master in optimizer.single_partition_of_fp32_groups:
            states = optimizer.optimizer.state.get(master, {})
            if self._in_8_bits and has_moments(states):
                to_blocks(states, master)
            elif not self._in_8_bits and is_blockwise(states):
                to_fp32(states, master)

    def link(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Lets ``safe_get_full_optimizer_state()`` find 8-bit states.

        ``safe_set_full_optimizer_state()`` refuses to set them.
        """
        for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
            states = optimizer.optimizer.state.get(master, {})
            if not is_blockwise(states):
                continue
            for parameter in optimizer.bit16_groups[group]:
                if parameter._hp_mapping is not None:
                    address = parameter._hp_mapping.get_hp_fragment_address()
                    first, last = address.start, address.start + address.numel
                    parameter._hp_mapping.optim_fragment = _Fragments(states, first, last)
                # The base sets this attribute again only when it links parameters with master weights.
                function = parameter.set_full_hp_param
                if getattr(function, "func", None) is not _set:
                    parameter.set_full_hp_param = functools.partial(_set, function)


def _loaded(optimizer):
    """Lists the 8-bit states of a checkpoint that an optimizer has loaded, each with the base's order of its group."""
    found = [optimizer.optimizer.state.get(master, {}) for master in optimizer.single_partition_of_fp32_groups]
    if not any(is_blockwise(states) and FORM in states for states in found):
        return []
    orders = getattr(optimizer, "base_orders", None) or base_orders(optimizer, layouts_of(optimizer))
    pairs = zip(found, orders, strict=True)
    return [(states, order) for states, order in pairs if is_blockwise(states) and FORM in states]


def _refuse_other_forms(states):
    """Raises ValueError if 8-bit states of a checkpoint have another form."""
    if states[FORM] != form():
        raise ValueError(
            f"8-bit optimizer states were loaded of the form {states[FORM]}, where {form()} is needed; load them with "
            "the release of this fork, the number of ranks and the settings with which they were saved"
        )


def _refuse_other_forms_and_partitions(states, order):
    """Raises ValueError if 8-bit states of a checkpoint have another form, or are those of another partition."""
    _refuse_other_forms(states)
    blocks, codes = blocks_of(order), -(-order.numel // 4)
    if any(states[names[0]].numel() != codes or states[names[1]].numel() != blocks for names in map(names_of, SIGNED)):
        raise ValueError(OTHER_PARTITION)


class _Fragments(Mapping):
    """State -> its values for one parameter in this rank's partition, fp32 1-D. Each read computes them.

    Args:
        states: the optimizer's states of the master weights.
        first, last: the parameter's elements [first, last), counted from the beginning of the partition's first block.
    """

    def __init__(self, states: Dict[str, Any], first: int, last: int):
        self._states, self._first, self._last, self._names = states, first, last, tuple(SIGNED)

    def __getitem__(self, state: str) -> torch.Tensor:
        if state not in self._names:
            raise KeyError(state)
        # States may have moved to the host and back since.
        return fp32_values(self._states, state, self._first, self._last)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def clear(self) -> None:
        """Called when states move. The base links parameters again afterwards."""
        self._names = ()


def _set(function, value, optim_state_key=None):
    """Does the base's ``function``, which sets a value of a parameter, unless the value is a state."""
    if optim_state_key is not None:
        raise RuntimeError(
            f"{optim_state_key} is kept in 8 bits, and to set it would round other parameters' values in its blocks "
            "anew; leave compile.optimizer_states out to set states"
        )
    function(value)


# Functions that DeepSpeed's engine and converter call -------------------------------------------------------------


def after_load(engine: "DeepSpeedEngine") -> None:
    """Called when an engine has loaded a checkpoint. Converts 8-bit states to fp32 if the engine keeps fp32 states."""
    optimizer, config = engine.optimizer, engine._config.compile_config
    # In a compiled engine, load_state_dict() has already converted the states.
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and not (config.deepcompile and config.optimizer_states):
        StatesOfAdam(in_8_bits=False).adopt(optimizer)


def before_step(engine: "DeepSpeedEngine") -> None:
    """Called before an optimizer steps. Without DeepCompile, its own ``step()`` runs, which needs fp32 states."""
    # An engine with the option steps like this if engine.compile() was refused, or before it compiles itself.
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) and not hasattr(engine.optimizer, "_deepcompile"):
        StatesOfAdam(in_8_bits=False).adopt(engine.optimizer)


def convert_saved(checkpoint: Dict[str, Any]) -> None:
    """Called when a tool such as ``ds_to_universal`` has read a rank's file. Converts 8-bit states to fp32.

    The caller then cuts the partition's padding off each state, which would damage codes.
    """
    inner = (checkpoint.get(OPTIMIZER_STATE_DICT) or {}).get(BASE_OPTIMIZER_STATE)
    for states in inner["state"].values() if isinstance(inner, dict) else ():
        if is_blockwise(states):
            _refuse_other_forms(states)
            to_fp32_in_base_order(states)
