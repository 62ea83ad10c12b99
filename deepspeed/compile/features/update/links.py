# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Links parameters with their master weights, for ``safe_get_full_fp32_param()`` and the function that sets them."""

import functools
import weakref

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import tensor_fragment

from .masters import Masters, parameters_of


class Fragment(tensor_fragment):
    """The part of a parameter in this rank's partition. Each read computes its master weights."""

    masters: Masters

    @property
    def hp_fragment(self) -> torch.Tensor:
        address = self.hp_fragment_address
        # A caller may have changed the parameter, which is a part of the master weight.
        self.masters.gather.wait_all()
        return self.masters.get(self.param_group_index, address.start, address.start + address.numel)

    def update_hp(self) -> None:
        self.masters.set(self.param_group_index, self.hp_fragment_address.start, self.lp_fragment)

    def update_lp(self) -> None:
        """Does nothing: the parameter is a part of its master weight."""


def link(optimizer: DeepSpeedZeroOptimizer, masters: Masters) -> None:
    """Called after the base has linked parameters with its own tensors. Links them with the master weights."""
    reference = weakref.ref(optimizer)
    for group in optimizer.bit16_groups:
        for parameter in group:
            if parameter._hp_mapping is not None:
                # The base's view would keep the memory of the fp32 master weights.
                vars(parameter._hp_mapping).pop("hp_fragment", None)
                parameter._hp_mapping.__class__ = Fragment
                parameter._hp_mapping.masters = masters
            parameter.set_full_hp_param = functools.partial(_set, reference, parameter, parameter.set_full_hp_param)


def _set(reference, parameter, function, value, optim_state_key=None):
    """Does ``function`` for a parameter: the base's method, or another part's in its place.

    Every rank gets the whole value. The parameter is a part of its master weight, so it has its new value at once, on
    all ranks, and not only after the next step.
    """
    if optim_state_key is not None:
        function(value, optim_state_key)
        return
    optimizer = reference()
    deepcompile = getattr(optimizer, "_deepcompile", None)
    if deepcompile is None:
        # The engine was destroyed, and nothing trains its master weights.
        return
    optimizer.masters_as_remainders.refuse_offloaded("set a master weight")
    # Parameters may still be on their way from the ranks that have stepped them.
    deepcompile.gather.wait_all()
    parameter.data.copy_(parameters_of(value, parameter.device).view_as(parameter))
    mapping = parameter._hp_mapping
    if mapping is not None:
        there = mapping.lp_fragment_address
        own = value.detach().flatten()[there.start : there.start + there.numel]
        mapping.masters.set(mapping.param_group_index, mapping.hp_fragment_address.start, own)
