# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""8-bit optimizer states in what DeepSpeed does with states: checkpoints, and ``safe_get_full_optimizer_state()``.

States that are loaded become 8-bit states when the next step begins (``update/eight_bit.py``). An engine without
``compile.optimizer_states`` that loads 8-bit states goes on with their values in fp32.
"""

import functools
from typing import TYPE_CHECKING, Any, Dict

import torch

from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE

from .layout import partition_offset
from .update.blockwise import SIGNED, fp32_values, is_blockwise, saved, to_fp32
from .update.dynamic_map import BLOCK

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def as_saved(state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Returns a state dict of the ZeRO-1/2 optimizer with 8-bit states in the form that torch's load keeps."""
    inner = state_dict[BASE_OPTIMIZER_STATE]
    # An elastic checkpoint has a list instead, and no 8-bit states.
    if isinstance(inner, dict):
        states = {index: saved(each) for index, each in inner["state"].items()}
        state_dict[BASE_OPTIMIZER_STATE] = {**inner, "state": states}
    return state_dict


def make_plain(optimizer: "DeepSpeedZeroOptimizer") -> None:
    """Makes 8-bit states that an optimizer has loaded fp32 states, with which its own ``step()`` can go on."""
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        states = optimizer.optimizer.state.get(master, {})
        if is_blockwise(states):
            to_fp32(states, partition_offset(optimizer, group), master.numel())


def link(optimizer: "DeepSpeedZeroOptimizer") -> None:
    """Lets ``safe_get_full_optimizer_state()`` find 8-bit states, and ``safe_set_full_optimizer_state()`` refuse them.

    Called when the base has linked the parameters with the states that have the shape of the master weights.
    """
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        states = optimizer.optimizer.state.get(master, {})
        if not is_blockwise(states):
            continue
        before = partition_offset(optimizer, group) % BLOCK
        for parameter in optimizer.bit16_groups[group]:
            if parameter._hp_mapping is not None:
                address = parameter._hp_mapping.get_hp_fragment_address()
                first = before + address.start
                parameter._hp_mapping.optim_fragment = _Fragments(states, first, first + address.numel)
            # The base makes this attribute anew each time that it links parameters with master weights.
            parameter.set_full_hp_param = functools.partial(_set, parameter.set_full_hp_param)


class _Fragments(dict):
    """State -> its values for one parameter in this rank's partition, fp32 1-D, computed when they are asked for.

    Args:
        states: the optimizer's states of the master weights.
        first: where the parameter begins, in elements from the beginning of the partition's first block.
        last: where it ends.
    """

    def __init__(self, states: Dict[str, Any], first: int, last: int):
        super().__init__(dict.fromkeys(SIGNED))
        self._states, self._first, self._last = states, first, last

    def __getitem__(self, state: str) -> torch.Tensor:
        # States may have moved to the host and back since.
        return fp32_values(self._states, state, self._first, self._last)


def _set(function, value, optim_state_key=None):
    """Sets what the base's ``function`` sets, unless this is a state."""
    if optim_state_key is not None:
        raise RuntimeError(
            f"{optim_state_key} is kept in 8 bits, and to set it would round other parameters' values in its blocks "
            "anew; leave compile.optimizer_states out to set states"
        )
    function(value)
