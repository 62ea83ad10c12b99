# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.optimizer_states`` and ``compile.store_param_remainders`` cannot do, and say before anything changes.

``test_section.py`` has what the configuration alone shows.
"""

import functools

import torch

from support.refusals import Refusal

STATES = {"config": {"compile": {"optimizer_states": "8bit"}}, "amends": {"optimizer_states": None}}
REMAINDERS = {
    "config": {"compile": {"store_param_remainders": True}},
    "amends": {"store_param_remainders": False},
}


class SubclassOfAdamW(torch.optim.AdamW):
    """Its step() may do anything."""


# By the name under which docs/reference/options.md has them.
REFUSED = {
    "compile.optimizer_states": Refusal(
        "compile.optimizer_states='8bit' is for Adam and AdamW of torch and DeepSpeed, not for SGD; use one of these, "
        "or leave compile.optimizer_states out",
        **STATES,
    ),
    "compile.store_param_remainders": Refusal(
        "compile.store_param_remainders is for Adam and AdamW of torch and DeepSpeed, not for SGD; use one of these, "
        "or leave compile.store_param_remainders out",
        **REMAINDERS,
    ),
}

# The same options with other optimizers.
ALSO_REFUSED = {
    "amsgrad": Refusal(
        "compile.optimizer_states='8bit' has no form for the third state of amsgrad=true; set amsgrad to false, or "
        "leave compile.optimizer_states out",
        optimizer=functools.partial(torch.optim.AdamW, amsgrad=True),
        **STATES,
    ),
    "betas": Refusal(
        "compile.store_param_remainders loses squares of falling gradients where betas[1] is below 0.5; raise it, or "
        "leave compile.store_param_remainders out",
        optimizer=functools.partial(torch.optim.AdamW, betas=(0.9, 0.25)),
        **REMAINDERS,
    ),
    "subclass": Refusal(
        "compile.store_param_remainders is for Adam and AdamW of torch and DeepSpeed, not for SubclassOfAdamW; use "
        "one of these, or leave compile.store_param_remainders out",
        optimizer=SubclassOfAdamW,
        **REMAINDERS,
    ),
}
