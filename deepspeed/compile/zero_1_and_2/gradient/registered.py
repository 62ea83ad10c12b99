# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The parameters that an engine registers with its reducer, and those that look like them."""

import collections
from typing import List, Sequence

from torch.nn import Module, Parameter

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def registered_parameters(optimizer: DeepSpeedZeroOptimizer) -> List[Parameter]:
    """Lists the registered parameters in the order in which the reducer numbers them, which is that of the model.

    A model lists its parameters roughly in the order in which its forward uses them, and the reducer expects gradients
    in the reverse order. The optimizer has its parameters in another order, for example by parameter group.
    """
    place = {id(parameter): index for index, parameter in enumerate(optimizer.param_names)}
    parameters = [parameter for group in optimizer.bit16_groups for parameter in group]
    return sorted(parameters, key=lambda parameter: place[id(parameter)])


def partially_trained_lookalikes(module: Module, registered: Sequence[Parameter]) -> List[Parameter]:
    """Lists trained parameters that look alike, of which only some are registered.

    The caller may train a parameter that no optimizer has. Layers that look alike share one graph, and no guard
    distinguishes a registered parameter from another one. Parameters look alike if modules of one class hold them
    under one name. Torch's own leaf layers do not count as holders, because the graph of their parent contains them.
    """
    known, places = {id(parameter) for parameter in registered}, collections.defaultdict(list)
    for holder in module.modules():
        if type(holder).__module__.startswith("torch.nn.") and next(holder.children(), None) is None:
            continue
        for name, parameter in holder.named_parameters():
            if parameter.requires_grad:
                places[type(holder), name, parameter.shape, parameter.dtype].append(parameter)
    mixed = (place for place in places.values() if len({id(parameter) in known for parameter in place}) == 2)
    return list({id(parameter): parameter for place in mixed for parameter in place}.values())
