# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers that treat each element by itself, and gradients to give to them."""

import os

import pytest
import torch

from deepspeed.accelerator import get_accelerator
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
# Each Adam that DeepCompile steps in one pass.
ADAMS = {
    **{name: make for name, make in {**OPTIMIZERS, **MORE_OPTIMIZERS}.items() if name.startswith(("Adam ", "AdamW"))},
    "Adam": OPTIMIZERS["Adam"],
    "Adam decoupled": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "DeepSpeed's AdamW": lambda p: deepspeed_adam(p, True, lr=0.1, weight_decay=0.1),
    "DeepSpeed's Adam": lambda p: deepspeed_adam(p, False, lr=0.1, weight_decay=0.1),
    "DeepSpeed's uncorrected": lambda p: deepspeed_adam(p, True, lr=0.1, bias_correction=False),
}


def deepspeed_adam(parameters, adamw, **settings):
    """Returns DeepSpeed's Adam in C++ for this machine's device."""
    if get_accelerator().device_name() == "cpu":
        return DeepSpeedCPUAdam(parameters, adamw_mode=adamw, **settings)
    return FusedAdam(parameters, adam_w_mode=adamw, **settings)


def skip_without_kernel():
    """Skips a test of Adam's kernel for GPUs where nothing runs it.

    Without a GPU, Triton's interpreter does if triton is installed and this variable is set.
    """
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, because the kernel is for GPUs")


def partition_of(optimizer, index=0, factor=None, new=None):
    """Returns a parameter group as the partition of one rank, with bf16 gradients and aligned memory of new values."""
    # This module has optimizers for other tests too, which run where this part was removed.
    from deepspeed.compile.zero_1_and_2.parameter.runs import in_one_run
    from deepspeed.compile.zero_1_and_2.step.rule import Partition

    (parameter,) = optimizer.param_groups[index]["params"]
    new = torch.empty_like(parameter.data, dtype=torch.bfloat16) if new is None else new
    return Partition(optimizer, index, factor, torch.bfloat16, in_one_run(new), step_is_unpatched=True)


class Uncut(torch.Tensor):
    """A tensor that is cut nowhere, as one that is quantized in blocks is cut only between blocks."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.narrow, torch.narrow):
            raise ValueError("not between blocks")
        return super().__torch_function__(function, types, args, kwargs)


class Momentum(torch.optim.Optimizer):
    """SGD with momentum that is cut nowhere, and that counts the steps of each element."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter).as_subclass(Uncut)
                    state["count"] = torch.zeros_like(parameter)
                state["count"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * state["momentum"].as_subclass(torch.Tensor))


class AdamInFp64:
    """Adam in fp64, as its authors have written it (https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101).

    Args:
        master: the weights.
        states: exp_avg and exp_avg_sq and, with amsgrad, max_exp_avg_sq.
    """

    def __init__(self, master, states):
        self.master, self.states = master.detach().double(), [state.double() for state in states]

    def step(self, gradient, optimizer, count):
        """Makes step ``count`` with the settings that the optimizer's only parameter group has now."""
        (group,) = optimizer.param_groups
        rate, decay, (beta, beta_sq) = float(group["lr"]), group["weight_decay"], group["betas"]
        mean, mean_sq, *most = self.states
        gradient = -gradient.double() if group.get("maximize") else gradient.double()
        if getattr(optimizer, "adam_w_mode", group.get("decoupled_weight_decay")):
            self.master = self.master * (1 - rate * decay)
        else:
            gradient = gradient + decay * self.master
        mean, mean_sq = beta * mean + (1 - beta) * gradient, beta_sq * mean_sq + (1 - beta_sq) * gradient**2
        most = [torch.maximum(value, mean_sq) for value in most]
        correction, correction_sq = 1 - beta**count, 1 - beta_sq**count
        if not group.get("bias_correction", True):
            correction = correction_sq = 1
        self.states = [mean, mean_sq, *most]
        self.master = self.master - rate * (mean / correction) / (
            (self.states[-1] / correction_sq).sqrt() + group["eps"]
        )


class Views(dict):
    """Offset -> gradient, given away as PartitionViews are."""

    flat_partition = None

    def take(self):
        taken = sorted(self.items())
        self.clear()
        return taken
