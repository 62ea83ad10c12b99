# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trained parameters of layers that look alike, of which the optimizer has only some."""

import collections
from typing import List, Sequence

from torch.nn import Module, Parameter

LEFT = (
    "DeepCompile leaves the gradients of {} parameters to autograd: layers that look alike share graphs, and the "
    "optimizer lacks a trained parameter of some; give it these too, or set their requires_grad to false"
)


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
