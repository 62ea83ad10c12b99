# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The parameters that an engine registers with its reducer."""

from typing import List

from torch.nn import Parameter

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def registered_parameters(optimizer: DeepSpeedZeroOptimizer) -> List[Parameter]:
    """Lists the registered parameters in the order in which the reducer numbers them, which is that of the model.

    A model lists its parameters roughly in the order in which its forward uses them, and the reducer expects gradients
    in the reverse order. The optimizer has its parameters in another order, for example by parameter group.
    """
    place = {id(parameter): index for index, parameter in enumerate(optimizer.param_names)}
    parameters = [parameter for group in optimizer.bit16_groups for parameter in group]
    return sorted(parameters, key=lambda parameter: place[id(parameter)])
