# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Recommends another implementation of experts where that of a model of transformers is slow, or trains no experts.

To transformers: the implementation "eager" loops over the experts that have tokens, whose number the host must wait
for, so ``torch.compile`` leaves the graph before each loop. The kernels of "deepgemm" write into new tensors, of which
autograd knows nothing, so experts get no gradient. Please say so where either is chosen for training.
"""

from typing import Iterator

from torch.nn import Module

_REMEDY = 'call model.set_experts_implementation("grouped_mm")'
ADVICE = {
    "eager": (
        "{} layers of experts have the implementation 'eager', which runs one expert after the other and leaves the "
        f"compiled graphs for that; {_REMEDY}"
    ),
    "deepgemm": (
        "{} layers of experts have the implementation 'deepgemm', which has no backward, so these experts are not "
        f"trained; {_REMEDY}"
    ),
}


def advice(module: Module) -> Iterator[str]:
    """Yields a sentence for each implementation in ``module`` that is not for training."""
    chosen = [_implementation(submodule) for submodule in module.modules()]
    for name, sentence in ADVICE.items():
        if count := chosen.count(name):
            yield sentence.format(count)


def _implementation(module):
    # Classes of experts whose implementation can be chosen have this method. Models have the configuration, too.
    if not hasattr(module, "_apply_gate"):
        return None
    return getattr(getattr(module, "config", None), "_experts_implementation", None)
