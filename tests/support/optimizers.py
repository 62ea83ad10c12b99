# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers that treat each element by itself, and gradients to give to them."""

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.compile.zero12.update.rule import Partition
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, weight_decay=0.1),
    # It averages from the third step on.
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, lambd=0.1, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}
# With settings that lead to other code of theirs.
MORE_OPTIMIZERS = {
    "Adam with L2": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "AdamW with L2": lambda p: torch.optim.AdamW([{"params": p, "decoupled_weight_decay": False}], lr=0.1),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=0.1, capturable=get_accelerator().device_name() != "cpu"),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=0.1, maximize=True, amsgrad=True),
    "AdamW with a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor([0.1]), foreach=False),
    "SGD with L2": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
}


def deepspeed_adam(parameters, adamw, **settings):
    """Returns DeepSpeed's Adam in C++ for this machine's device."""
    if get_accelerator().device_name() == "cpu":
        return DeepSpeedCPUAdam(parameters, adamw_mode=adamw, **settings)
    return FusedAdam(parameters, adam_w_mode=adamw, **settings)


def partition_of(optimizer, index=0, factor=None, new=None):
    """Returns a parameter group as the partition of one rank, with bf16 gradients and aligned memory of new values."""
    (parameter,) = optimizer.param_groups[index]["params"]
    new = torch.empty_like(parameter.data, dtype=torch.bfloat16) if new is None else new
    return Partition(optimizer, index, 0, factor, torch.bfloat16, new)


class Views(dict):
    """Offset -> gradient, given away as PartitionViews are."""

    flat_partition = None

    def take(self):
        while self:
            yield self.popitem()
