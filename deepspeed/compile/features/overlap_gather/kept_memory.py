# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Finds out that somebody keeps tensors with the memory of parameters, such as a list of ``parameter.data``.

Such a tensor has a class of its own, so reading it cannot wait for a parameter that is being gathered. But it counts
as a user of the memory, as each tensor of the engine's own does.
"""

import weakref
from typing import Iterator, List

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.gradient.native import users_of


class KeptMemory:
    """Compares the users of an optimizer's flat tensors with the tensors that DeepSpeed and the engine have there."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer):
        self._optimizer = weakref.ref(optimizer)
        # Of each group, how many of its flat tensor's users were known at the last look.
        self._known: List[int] = [0] * len(optimizer.bit16_groups_flat)

    def is_kept(self) -> bool:
        """Whether a tensor that neither the engine nor DeepSpeed has shares the memory of parameters.

        To be called where no step is under way, which has views of its own. Whoever keeps the outputs of a forward
        whose backward has not run keeps such tensors, too.
        """
        optimizer = self._optimizer()
        for group, flat in enumerate(optimizer.bit16_groups_flat):
            users = users_of(flat.untyped_storage())
            if users != self._known[group]:
                # Count anew: parameters may have been moved elsewhere, or back.
                self._known[group] = sum(1 for _ in _known_users(optimizer, group))
                if users > self._known[group]:
                    return True
        return False


def _known_users(optimizer: DeepSpeedZeroOptimizer, group: int) -> Iterator[torch.Tensor]:
    """Yields the tensors in a group's flat tensor that DeepSpeed has: itself, parameters, partitions and fragments."""
    flat = optimizer.bit16_groups_flat[group]
    parameters = optimizer.bit16_groups[group]
    links = (getattr(parameter, "_hp_mapping", None) for parameter in parameters)
    tensors = (
        flat,
        *parameters,
        *optimizer.parallel_partitioned_bit16_groups[group],
        *(link.lp_fragment for link in links if link is not None),
    )
    first = flat.data_ptr()
    behind = first + flat.numel() * flat.element_size()
    # A parameter that is still being gathered need not arrive to say where it lies.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            if first <= tensor.data_ptr() < behind:
                yield tensor
