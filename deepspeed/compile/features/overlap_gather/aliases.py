# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Finds out that somebody has aliases of parameters: other tensors with their memory, such as a ``parameter.data``.

An alias has a class of its own, so reading it cannot wait for a parameter that is being gathered. But it counts as a
user of the memory, as each tensor of the engine's own does.
"""

import weakref
from typing import Iterable, List

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.gradient.native import users_of


class Aliases:
    """Compares the users of an optimizer's flat tensors with the tensors that DeepSpeed and the engine have there."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer):
        self._optimizer = weakref.ref(optimizer)
        # How many tensors beside parameters each group had at the last look.
        self._others: List[int] = [0] * len(optimizer.bit16_groups_flat)

    def exist(self) -> bool:
        """Whether a tensor that neither the engine nor DeepSpeed has shares the memory of parameters.

        To be called where no step is under way, which has views of its own. Whoever keeps the outputs of a forward
        whose backward has not run keeps aliases, too.
        """
        optimizer = self._optimizer()
        for group, flat in enumerate(optimizer.bit16_groups_flat):
            # Look for parameters each time: the caller may have moved them elsewhere, and kept their memory.
            users = users_of(flat.untyped_storage()) - _count_in(flat, optimizer.bit16_groups[group])
            if users != self._others[group]:
                self._others[group] = _count_in(flat, _others(optimizer, group))
                if users > self._others[group]:
                    return True
        return False


def _others(optimizer: DeepSpeedZeroOptimizer, group: int) -> List[torch.Tensor]:
    """Lists the tensors beside parameters that DeepSpeed has in a group's flat tensor, and that tensor."""
    links = (getattr(parameter, "_hp_mapping", None) for parameter in optimizer.bit16_groups[group])
    tensors = [
        optimizer.bit16_groups_flat[group],
        *(link.lp_fragment for link in links if link is not None),
    ]
    # A view keeps the tensor of which it is one.
    tensors += [tensor._base for tensor in tensors if tensor._base is not None]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _count_in(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> int:
    """Counts the tensors that share a flat tensor's memory."""
    first = flat.data_ptr()
    behind = first + flat.numel() * flat.element_size()
    storage = flat.untyped_storage()._cdata
    # A parameter that is still being gathered need not arrive to say where it lies.
    with torch._C.DisableTorchFunctionSubclass():
        # A tensor without elements has no address.
        return sum(
            first <= tensor.data_ptr() < behind or (not tensor.numel() and tensor.untyped_storage()._cdata == storage)
            for tensor in tensors
        )
